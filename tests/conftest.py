"""Every test starts with a clean Dynamo; the session has an Inductor cache of its own, so that nothing is warm by chance."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core (pytest-xdist): threads would only wait
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fp8compile-tests-")

import pytest
import torch

from fp8compile import store, verify

verify.enabled = True  # every graph that any test compiles is held against the specification after every pass


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_before() -> None:
    """A model of another file, of a class and with parameters alike, is not asked about by this one."""
    store._compiled.clear()


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
