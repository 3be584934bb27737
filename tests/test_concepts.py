"""One concept, one home: what says it is written in one file, and a second definition is found by its text."""

from __future__ import annotations

import re

import pytest

from tests.support.sources import FILES, code

SETS = "VIEWS|RESHAPES|TRANSPOSES|CASTS?|MATMULS|POINTWISE|REDUCTIONS|STATISTICS|ACCUMULATIONS|SPLITS"
KINDS = "view|cast|pointwise|reduction|matmul|attention|split"

# What gives a concept away, and the only modules where it may stand.
HOMES = {
    "the facts of a tensor": (r"\bTensorInfo\(", ()),  # its own class methods make it
    "a tensor's shape as text": (r"', '\.join\(.*shape\)", ("fx.graph",)),
    "declined, because": (r"class \w*Skip\b", ("reporting.entries",)),
    "which operators are views, casts, matmuls ...": (rf"^_?({SETS})( =|:)", ("fx.ops",)),
    "whether a node is a view, a cast, a matmul ...": (rf"^ *def _?is_({KINDS})\b", ("fx.ops",)),
    "AOTAutograd's descriptors": (r"AOT(In|Out)put\b", ("_torch", "fx.aot")),
    "a descriptor in a node's meta": (r"meta(\.get\(|\[)'desc'", ("fx.partition", "fx.aot")),
    "who put a node there": (r"SPLICED.*(startswith|split|in str)", ()),
    "a boxed runner of a graph": (r"_boxed_call", ("compiler.node_by_node",)),
    "one step of a model": (r"def _?(default_loss|one_step|left_as_it_was)\b", ("tools.trial_step",)),
    "signal to noise in dB": (r"log10\((?!False)", ("numerics.metrics",)),
    "what a recipe leaves": (r"is off for module", ("recipe.context",)),
    "FP16's and FP8's limits": (r"65504\.0|2\.0?\*\*-14|float8_e[45]m", ("numerics.formats",)),
    "the multiple that FP8 matmuls ask for": (r"MULTIPLE = |% 16\b", ("numerics.formats",)),
    "a hash of the sources": (r"sha256.*__version__", ("compiler.sources",)),
    "a console for reports": (r"\bConsole\(", ("_text", "extras.demo.run", "extras.demo.table")),
}


@pytest.mark.parametrize("concept", HOMES)
def test_a_concept_has_one_home(concept: str) -> None:
    text, homes = HOMES[concept]
    found = {name.removeprefix("fp8compile.") for name, path in FILES.items() if re.search(text, code(path), re.M)}
    assert found <= set(homes), f"{concept} stands in {sorted(found - set(homes))}"
    assert not homes or homes[-1] in found, "the home has moved, or the text says no longer what it gives away"
