"""What tests of several passes start with."""

import sys
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture
def fp8_units() -> Iterator[None]:
    """Every device multiplies FP8: torch._scaled_mm exists for the CPU, if slowly."""
    with mock.patch.object(sys.modules["fp8compile.linears.reasons"], "fp8_unsupported_reason", lambda device: None):
        yield
