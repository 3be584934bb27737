"""Every test starts with a clean Dynamo; the session has an Inductor cache of its own, so that nothing is warm by chance."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fp8compile-tests-")

import pytest
import torch


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`nightly` and `gpu` tests run only when asked for by -m, or where there is such a GPU."""
    if not config.getoption("-m"):
        gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
        left_out = [i for i in items if i.get_closest_marker("nightly") or (i.get_closest_marker("gpu") and not gpu)]
        items[:] = [i for i in items if i not in left_out]
        config.hook.pytest_deselected(items=left_out)
