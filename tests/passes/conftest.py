"""Fixtures of passes."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from fp8compile import _torch as private


@pytest.fixture
def vnni() -> Iterator[None]:
    """Every CPU multiplies INT8: ``_int_mm`` runs on all, if slowly."""
    with mock.patch.object(private, "cpu_has_vnni", lambda: True):
        yield
