"""What one rank decides alone adds no collective and leaves none out: a cache may be warm on one and cold on another."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support import parallel
from tests.support.parallel import Setup, differing
from tests.support.parallel_modes import ddp_around_compiled, tensor_parallel
from tests.support.ranks import on_ranks

MODES = {"DDP": ddp_around_compiled, "TP": tensor_parallel}


def generated(mode: str, folder: Path) -> dict[str, Any]:
    """A run on generated code; each rank has a cache folder of its own."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / str(dist.get_rank()))
    parallel.STEPS = 1  # of one shape: minutes go into kernels
    found = MODES[mode](Setup(options={"debug.codegen": "inductor"}))
    hits, misses = (counters["aot_autograd"][f"autograd_cache_{what}"] for what in ("hit", "miss"))
    return {
        "losses": found.losses,
        "linears": found.linears,
        "saved": found.saved_bytes,
        **found.parameters,
        **found.states,
        "hits": hits,
        "misses": misses,
    }


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_is_warm_and_the_other_cold(mode: str, tmp_path: Path) -> None:
    """Cold is who has no entry. Kernels stay: a rank waits for the others no longer than torch.distributed's time-out."""
    first = on_ranks(2, generated, mode, tmp_path)
    for name in ("aotautograd", "fxgraph", "fp8compile"):
        shutil.rmtree(tmp_path / "1" / name)
    second = on_ranks(2, generated, mode, tmp_path)
    for before, after in zip(first, second, strict=True):
        assert set(differing(after, before)) <= {"hits", "misses"}
    assert second[0]["hits"] > 0 and second[0]["misses"] == 0
    assert second[1]["misses"] == first[1]["misses"] > 0
