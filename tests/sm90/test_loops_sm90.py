"""What a kernel loads inside a loop is loaded once more behind it (compiler/loop_loads.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of


def test_triton_takes_kernels_that_look_rows_up_by_what_was_looked_up() -> None:
    assert result_of("run_loops")["ours"] == []


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="only torch 2.13 is known to need it")
def test_plain_inductor_s_kernel_is_refused_still() -> None:
    """Where it is not any more, the mend can go."""
    assert "is not defined" in "".join(result_of("run_loops")["plain"])
