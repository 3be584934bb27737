"""The pipeline as it stands: names that switch off one pass each, and what each says of numbers."""

from __future__ import annotations

import sys

import pytest

from fp8compile.compiler import pipeline
from fp8compile.compiler.pipeline import Pass

PASSES: list[Pass] = [
    *pipeline.BEFORE_PATTERNS,
    *pipeline.ISLANDS,
    *pipeline.OBSERVE_JOINT,
    *pipeline.WIRE,
    *pipeline.JOINT,
    pipeline.CUT,
    *pipeline.SOUND,
    *pipeline.PARTITION,
    pipeline.MEASURED,
    *pipeline.OFFLOAD,
    *pipeline.OBSERVE_FORWARD,
    *pipeline.DELAYED,
    *pipeline.POST_GRAD,
]


def test_every_tuple_is_known_here() -> None:
    named = [value for name, value in vars(pipeline).items() if name.isupper()]
    found = [each for value in named for each in ((value,) if isinstance(value, Pass) else value)]
    assert {*found} == {*PASSES} and len(found) == len(PASSES)


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_no_pass_is_named_inside_another(each: Pass) -> None:
    """Inductor matches substrings where passes are switched off by name."""
    assert [other.name for other in PASSES if each.name in other.name] == [each.name]


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_the_first_line_says_whether_numbers_change(each: Pass) -> None:
    said = (sys.modules[each.run.__module__].__doc__ or "").split("\n")[0]
    assert said.startswith("Numbers change" if each.changes_numbers else "Numbers stay as they are")
