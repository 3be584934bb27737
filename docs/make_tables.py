"""The tables of the guides that list fields and options, made from the code: between the markers nothing is typed.

    recipe      the fields of fp8compile.Recipe, with the text of its docstring
    presets     what each preset changes
    optimizer   the options that all optimizers share
    states      the formats of optimizer states, and their bits
    scaler      the options of LossScaler;  limits  of LossScaleCollapse

python docs/make_tables.py            rewrites the blocks
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a script's own folder is all that is there

from fp8compile import Recipe
from fp8compile.amp import Limits, LossScaler
from fp8compile.amp.options import BOUNDS, INTERVALS, MODES, STARTS, ScalerOptions
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_codec
from fp8compile.optim import EncodedOptimizer
from fp8compile.recipe.changes import TOP, single
from fp8compile.recipe.groups import GROUPS
from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS
from fp8compile.recipe.presets import PRESETS
from fp8compile.recipe.validation import BOOLEANS, CHOICES, COUNTS, ISLANDS, OR_AUTO

ROOT = Path(__file__).resolve().parents[1]
SHAPE = (128, 1024)  # of the state whose bits are counted


def described(docstring: str | None, section: str) -> dict[str, str]:
    """The entries of a docstring's section, "Args" or "Attributes", by name, as Markdown."""
    text = inspect.cleandoc(docstring or "").split(f"\n{section}:\n")[1]
    block = re.match(r"(?:    .*\n?)*", text)
    assert block is not None
    found: dict[str, str] = {}
    for names, meaning in re.findall(
        r"^    (\w+(?:, \w+)*): ((?:.*\n?(?!    \w+(?:, \w+)*:))*)", block.group(), re.M
    ):
        cell = " ".join(meaning.split()).replace("``", "`").replace("|", "\\|")
        found |= dict.fromkeys(names.split(", "), cell)
    return found


def recipe_table() -> str:
    """Every field of a recipe: its default, what it may be, what it means; those of groups by dotted names."""
    rows = []
    for group, kind in GROUPS.items():
        meanings = described(kind.__doc__, "Attributes")
        rows += [_recipe_row(f"{group}.{f.name}", f.default, meanings[f.name]) for f in dataclasses.fields(kind)]
    own = described(Recipe.__doc__, "Attributes")
    rows += [_recipe_row(f.name, f.default, own[f.name]) for f in dataclasses.fields(Recipe) if f.name in TOP]
    return _table(("field", "default", "values", "meaning"), rows)


def _recipe_row(name: str, default: Any, meaning: str) -> tuple[str, str, str, str]:
    return f"`{name}`", _default(default), _values(name), meaning[:1].upper() + meaning[1:]


def _default(value: Any) -> str:
    if value == OUTPUT_HEAD_PATTERNS:
        return "output heads"
    return f"`{dict(value)!r}`" if isinstance(value, Mapping) else f"`{value!r}`"


def _values(name: str) -> str:
    """What a field may be, where that is a list."""
    if name in BOOLEANS:
        return "`True`, `False`"
    known = {**CHOICES, **dict.fromkeys(OR_AUTO, ("auto", True, False)), "fp32.islands": ISLANDS}
    if name in known:
        values = ", ".join(f"`{value!r}`" for value in known[name])
        return values + {"fp32.islands": ", a calibration", "linears.formats": ", a dict by direction"}.get(name, "")
    if name in COUNTS:
        return "{} to {}".format(*COUNTS[name])
    if name == "saved.bits":
        return "`'off'`, a choice of bits"
    return {"saved.min_numel": "0 and above", "memory.chunk_logits": "`'off'`, `'auto'`, 2 to 64"}.get(name, "")


def presets_table() -> str:
    rows = [(f"`{name}`", _changes(single(changes))) for name, changes in PRESETS.items()]
    return _table(("preset", "what it changes"), rows)


def _changes(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}={value!r}`" for name, value in changes.items()) or "nothing"


def optimizer_table() -> str:
    """The keyword options of every optimizer."""
    meanings = described(EncodedOptimizer.__doc__, "Args")
    parameters = inspect.signature(EncodedOptimizer.__init__).parameters.values()
    options = [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    return _table(
        ("option", "default", "meaning"), [(f"`{p.name}`", f"`{p.default!r}`", meanings[p.name]) for p in options]
    )


def states_table() -> str:
    """Formats and the bits that a state of 128 x 1024 elements takes per element, scales included."""
    rows = [(f"`{name}`", _bits(name, True), _bits(name, False)) for name in STATE_FORMATS]
    return _table(("format", "bits, first moment", "bits, second moment"), rows)


def _bits(name: str, signed: bool) -> str:
    if name in (UNSIGNED_ONLY if signed else SIGNED_ONLY):
        return "-"
    parts = state_codec(name, signed=signed).encode(torch.ones(SHAPE))
    return f"{sum(part.numel() * part.element_size() * 8 for part in parts) / (SHAPE[0] * SHAPE[1]):.4g}"


def scaler_table() -> str:
    """The options of a loss scaler; defaults that depend on the mode are given for each mode."""
    meanings = described(LossScaler.__doc__, "Args")
    by_mode = {"init_scale": STARTS, "growth_interval": INTERVALS}
    by_mode |= {"floor": {m: b[0] for m, b in BOUNDS.items()}, "ceiling": {m: b[1] for m, b in BOUNDS.items()}}
    rows = []
    for name, default in _scaler_defaults().items():
        per_mode = ", ".join(f"{by_mode[name][mode]:g} ({mode})" for mode in MODES) if name in by_mode else ""
        rows.append((f"`{name}`", per_mode or f"`{default!r}`", meanings[name]))
    return _table(("option", "default", "meaning"), rows)


def _scaler_defaults() -> dict[str, Any]:
    own = inspect.signature(LossScaler.__init__).parameters.values()
    shell = {p.name: p.default for p in own if p.name not in ("self", "mode", "options")}
    return {f.name: f.default for f in dataclasses.fields(ScalerOptions)} | shell


def limits_table() -> str:
    rows = [(f"`{f.name}`", f"{f.default:g}") for f in dataclasses.fields(Limits)]
    return _table(("limit", "default"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "recipe": recipe_table,
    "presets": presets_table,
    "optimizer": optimizer_table,
    "states": states_table,
    "scaler": scaler_table,
    "limits": limits_table,
}
PAGES: Mapping[str, tuple[str, ...]] = {
    "docs/guide/recipes.md": ("recipe", "presets"),
    "docs/guide/optimizers.md": ("optimizer", "states"),
    "docs/guide/fp16.md": ("scaler", "limits"),
}


def made(text: str) -> str:
    """``text`` with every block whose markers it has made anew.

    Raises:
        ValueError: a marker is missing or stands twice.
    """
    for name in re.findall(r"<!-- docs/make_tables.py: (\w+), begin -->", text):
        begin, end = (f"<!-- docs/make_tables.py: {name}, {where} -->\n" for where in ("begin", "end"))
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{begin!r} and {end!r} must stand once each in the page: put them back")
        before, rest = text.split(begin)
        text = f"{before}{begin}{BLOCKS[name]()}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(made(path.read_text()))


if __name__ == "__main__":
    main()
