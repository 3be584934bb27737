"""The entries of Recipe.modules that leave candidates exact, and no others; the line that says so."""

from __future__ import annotations

import pytest

from fp8compile import Recipe
from fp8compile.tools.checking.exact_modules import SWITCHES, entries, leaving, options_text
from fp8compile.tools.checking.repair import RepairCandidate


def both(*modules: str) -> list[RepairCandidate]:
    return [RepairCandidate(module, kind) for module in modules for kind in ("saved", "linears")]


KNOWN = both("", "layers.0", "layers.0.mlp", "layers.1", "layers.1.mlp", "head[0]")


@pytest.mark.parametrize(
    ("exact", "expected"),
    [
        ([RepairCandidate("layers.0.mlp", "saved")], {"layers.0.mlp": {"saved": "off"}}),
        (both("layers.0.mlp"), {"layers.0.mlp": {"linears": "off", "saved": "off"}}),
        ([RepairCandidate(f"layers.{i}.mlp", "linears") for i in (0, 1)], {"layers.*.mlp": {"linears": "off"}}),
        ([RepairCandidate("layers.0", "saved")], {"layers.0.mlp": {}, "layers.0": {"saved": "off"}}),
        ([RepairCandidate("", "saved")], {"": {"saved": "off"}}),
        ([RepairCandidate("head[0]", "saved")], {"head[[]0]": {"saved": "off"}}),
    ],
)
def test_only_what_is_named_is_exact(exact: list[RepairCandidate], expected: dict[str, object]) -> None:
    assert entries(frozenset(exact), KNOWN, Recipe()) == expected
    for base in (Recipe(), Recipe(linears={"emulate": True}, modules={"layers.1": {"saved.group_size": 64}})):
        left = leaving(base, frozenset(exact), KNOWN)
        for candidate in KNOWN:
            here, was = left.at(candidate.module), base.at(candidate.module)
            assert (here.get(SWITCHES[candidate.kind]) == "off") == (candidate in exact)
            assert (here.saved.group_size, here.linears.emulate) == (was.saved.group_size, was.linears.emulate)
        assert Recipe.from_options(eval(options_text(left).removeprefix("options="))) == left
