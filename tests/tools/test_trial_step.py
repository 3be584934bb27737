"""What a step for inspection leaves as it was."""

from __future__ import annotations

import random

import numpy

from fp8compile.tools.trial_step import left_as_it_was
from tests.support.sensitive import Net


def test_other_generators_go_on_as_they_were() -> None:
    random.seed(1)
    numpy.random.seed(1)
    with left_as_it_was(Net()):
        inside = random.random(), numpy.random.rand()
    assert (random.random(), numpy.random.rand()) == inside
