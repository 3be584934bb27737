"""Does it train as well? A 1B-shaped model on real text beside its BF16 twin: same seed, same batches, same rates.

    text   the demo's: the bytes of Python's own standard library
    twin   FP32 parameters under BF16 autocast, plain Inductor, torch's fused AdamW
    ours   the same under fp8compile's default recipe, with AdamW and ``e4m3_expanded`` states
    gap    our loss / the twin's - 1, of the mean of the last 50 training losses, and of the validation loss

Both arms take step after step in turn, so that whatever was reached when the run is cut off can be compared. It goes on from
its checkpoint, written every few minutes and at the end of the time given; the gap is written to the results file as it goes.

    python benchmarks/studies/parity.py [--device cpu --tiny] [--steps 2000] [--minutes 8.5] [--out DIR] [--checkpoint FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))  # a script's own folder is all that is there

from benchmarks.harness import peers
from benchmarks.harness.llama import LLAMA_1B, TINY, Llama, Shape, initialised, rotary_tables
from benchmarks.harness.plots import written
from benchmarks.harness.results import FOLDER, Results
from fp8compile import optim
from fp8compile.extras.demo.data import VOCABULARY, Corpus, load_corpus, train_batches, validation_batches
from fp8compile.extras.demo.model import rate_schedule

SAVED_EVERY = 150.0  # seconds
WRITTEN_EVERY = 10  # steps
LAST = 50  # training losses in a mean
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Plan:
    """What is trained, on what."""

    name: str
    shape: Shape
    batch: int
    length: int
    rate: float
    validation_windows: int
    evaluate_every: int


ONE_B = Plan("1b", Shape(**{**asdict(LLAMA_1B), "vocabulary": VOCABULARY}), 8, 1024, 3e-4, 32, 100)
TOY = Plan("tiny", Shape(**{**asdict(TINY), "vocabulary": VOCABULARY}), 2, 64, 1e-3, 4, 5)


class Twin:
    """One arm: its model, optimizer and losses."""

    def __init__(self, ours: bool, plan: Plan, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        with device:
            self.model: Any = initialised(Llama(plan.shape))
        self.tables = rotary_tables(plan.shape, plan.length, device, torch.bfloat16)
        self.device, self.plan = device, plan
        self.call = peers.ours(self.model, device) if ours else peers.inductor(self.model)
        settings = {"lr": plan.rate, "betas": (0.9, 0.99), "weight_decay": 0.1}
        of_torch = torch.optim.AdamW(self.model.parameters(), fused=True, **settings) if not ours else None
        self.optimizer: Any = of_torch or optim.AdamW(self.model, **settings)
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []

    def step(self, tokens: Tensor, rate: float) -> None:
        """One optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._autocast():
            loss = self.call(tokens.to(self.device), *self.tables)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(float(loss.detach()))

    def evaluate(self, batches: Sequence[Tensor]) -> None:
        """The eager model's loss on text it does not train on; the same judge for both arms."""
        with torch.no_grad(), self._autocast():
            losses = [float(self.model(tokens.to(self.device), *self.tables)) for tokens in batches]
        self.validation.append((len(self.losses), sum(losses) / len(losses)))

    def state(self) -> dict[str, Any]:
        """All that a later run needs."""
        kept = {"losses": self.losses, "validation": self.validation}
        return {**kept, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses, self.validation = state["losses"], [tuple(each) for each in state["validation"]]

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)


def gap(ours: float, twin: float) -> float:
    """Relative: positive where ours is worse."""
    return ours / twin - 1


def row_of(twins: dict[str, Twin], plan: Plan, steps: int, corpus: Corpus) -> dict[str, Any]:
    """What the results file says, at any step."""
    ours, twin = twins["ours"], twins["bf16"]
    means = [sum(t.losses[-LAST:]) / len(t.losses[-LAST:]) for t in (ours, twin)]
    row: dict[str, Any] = {"benchmark": "parity", "case": plan.name, "shape": asdict(plan), "arms": {}}
    row |= {"step": len(ours.losses), "steps": steps, "text_sha256": corpus.sha256, "training_gap": gap(*means)}
    row["losses"] = {name: [round(loss, 5) for loss in t.losses] for name, t in twins.items()}
    row["validation"] = {name: t.validation for name, t in twins.items()}
    row["says"] = f"step {row['step']} of {steps}: training loss gap {row['training_gap']:+.3%}"
    if ours.validation and twin.validation and ours.validation[-1][0] == twin.validation[-1][0]:
        row["validation_gap"] = gap(ours.validation[-1][1], twin.validation[-1][1])
        row["says"] += f", validation {row['validation_gap']:+.3%} at step {ours.validation[-1][0]}"
    return row


def save(twins: dict[str, Twin], path: Path, steps: int) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save({"steps": steps, **{name: twin.state() for name, twin in twins.items()}}, partial)
    partial.replace(path)


def resumed(twins: dict[str, Twin], path: Path, steps: int, device: torch.device) -> None:
    """Load the checkpoint, if there is one of a run of as many steps (the rates depend on them)."""
    if not path.exists():
        return
    state = torch.load(path, map_location=device, weights_only=False)
    if state["steps"] != steps:
        raise ValueError(
            f"{path} is of a run of {state['steps']} steps, not {steps}. Fix: --steps {state['steps']}, or remove it."
        )
    for name, twin in twins.items():
        twin.load(state[name])
    print(f"goes on from step {len(twins['ours'].losses)}", flush=True)


def batches(corpus: Corpus, plan: Plan, seed: int, steps: int, done: int) -> Iterator[Tensor]:
    """The batches from step ``done`` on; those before are drawn and dropped."""
    for number, tokens in enumerate(train_batches(corpus.train, plan.batch, plan.length + 1, seed, steps)):
        if number >= done:
            yield tokens


def train(
    twins: dict[str, Twin], plan: Plan, args: argparse.Namespace, tell: Callable[[], None], corpus: Corpus
) -> None:
    """Step both arms until the steps or the minutes are over."""
    end = time.monotonic() + 60 * args.minutes
    saved, rates = time.monotonic(), rate_schedule(args.steps)
    held_out = validation_batches(corpus.validation, plan.batch, plan.length + 1, plan.validation_windows)
    for tokens in batches(corpus, plan, args.seed, args.steps, len(twins["ours"].losses)):
        if time.monotonic() > end:
            break
        for twin in twins.values():
            twin.step(tokens, plan.rate * rates(len(twin.losses)))
        done = len(twins["ours"].losses)
        if done % plan.evaluate_every == 0 or done == args.steps:
            for twin in twins.values():
                twin.evaluate(held_out)
        if done % WRITTEN_EVERY == 0 or done == args.steps:
            tell()
        if time.monotonic() - saved > SAVED_EVERY:
            save(twins, args.checkpoint, args.steps)
            saved = time.monotonic()
    save(twins, args.checkpoint, args.steps)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the machinery")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--checkpoint", type=Path, default=Path("build/parity.pt"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here. Fix: --device cpu --tiny")
    plan, device, corpus = TOY if args.tiny else ONE_B, torch.device(args.device), load_corpus()
    twins = {name: Twin(name == "ours", plan, device, args.seed) for name in ("bf16", "ours")}
    resumed(twins, args.checkpoint, args.steps, device)

    def tell() -> None:
        results = Results.opened(args.out, args.device, args.tiny)
        results.add(row_of(twins, plan, args.steps, corpus))
        print(results.rows[f"parity: {plan.name}"]["says"], flush=True)

    train(twins, plan, args, tell, corpus)
    if twins["ours"].losses:
        tell()
        written(Results.opened(args.out, args.device, args.tiny))


if __name__ == "__main__":
    main()
