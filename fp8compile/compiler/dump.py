"""Graph dumps: every pass with the graph before and after it, as files, in torch's structured trace, or in memory.

    <folder>/graph-0/05-cut_for_bytes/{before,after}.txt    what the pass did in numbers; a line an operation or codec's call
                                      diff.txt              ops whose number changed, and lines that did
                                      after.dot             a drawing of the same
                                      after-full.{txt,dot}  every node of the codecs too
    <folder>/graph-0/report.txt, report.json
    <folder>/optimizer-0/{step,step-full}.txt, step.dot       a compiled step of parameters (fp8compile/optim/step_dump.py)

Graphs are numbered in the order in which this process compiles them; a rank of a process group has a folder of its own.
The folder is ``Recipe.debug.dump``, or FP8COMPILE_DUMP where the recipe has none. Two runs of a program give equal files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fp8compile.fx.dump_files import claim, root_of, trace, tracing, write
from fp8compile.fx.snapshot import PassStep, Snapshot, snapshot_of
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport
from fp8compile.reporting.report import Report


@dataclass
class DumpWatcher:
    """Watches one graph compile (see fp8compile/compiler/watchers.py) and hands on what it saw, pass by pass.

    Attributes:
        folder: where files go, if anywhere.
        traced: whether to write to torch's structured trace (TORCH_TRACE), for tlparse.
        kept: whether to keep the steps in memory, as far as they are of the graph as a whole.
    """

    folder: Path | None
    traced: bool
    kept: bool
    steps: list[PassStep] = field(default_factory=list)
    _count: int = 0

    def look(self, seen: object, half: str = "") -> Snapshot:
        return snapshot_of(seen, half)  # type: ignore[arg-type]

    def step(self, name: str, before: Snapshot, after: Snapshot) -> None:
        self._count += 1
        step, place = PassStep(name, before, after), f"{self._count:02}-{name}"
        texts = {"before.txt": before.text, "after.txt": f"# {step.numbers}\n\n{after.text}", "diff.txt": step.diff}
        self._hand_on(place, {**texts, "after.dot": after.to_dot()}, f"{name}_")
        full = {"after-full.txt": after.full_text, "after-full.dot": after.to_dot(expand=True)}
        if self.folder and not write(self.folder, full, place):
            self.folder = None
        if self.kept and not after.is_half:
            self.steps.append(step)

    def report(self, reports: tuple[GraphReport, ...], recipe: Recipe) -> None:
        report = Report(reports, str(recipe.changed({"debug.dump": None})))
        self._hand_on("", {"report.txt": f"{report.to_text()}\n", "report.json": f"{report.to_json()}\n"})

    def _hand_on(self, place: str, texts: Mapping[str, str], prefix: str = "") -> None:
        if self.folder and not write(self.folder, texts, place):
            self.folder = None  # nothing more of this graph
        if self.traced:
            for name, text in texts.items():
                trace(f"fp8compile_{prefix}{name}", text)


def watch_for(recipe: Recipe, kept: bool = False) -> DumpWatcher | None:
    """The watcher of the next graph; None if nobody asks for one, or if the folder that was asked for cannot be used."""
    root = root_of(recipe.debug.dump)
    folder, traced = claim(root) if root else None, tracing()
    return DumpWatcher(folder, traced, kept) if folder or traced or kept else None
