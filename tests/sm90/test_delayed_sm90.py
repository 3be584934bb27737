"""Delayed scales and cached weights lowered for an H100: the kernels do what eager does, statistics included.

What they move is in test_layers_sm90.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

ROUNDINGS = 512  # on the longest way through the layer and back, in FP32; one code that is a step off moves more


@pytest.mark.parametrize("merged", [(), ("--merged",)], ids=["dgrads apart", "dgrads merged"])
def test_interpreted_kernels_do_what_the_graph_does_statistics_included(merged: tuple[str, ...]) -> None:
    differences = result_of("run_delayed", *merged, interpret=True)["differences"]
    amaxes = {name: d for name, d in differences.items() if name.startswith("amax")}
    assert len(amaxes) == 4 + 7 and max(differences.values()) < ROUNDINGS * 2.0**-24, differences


@pytest.mark.parametrize(("kind", "in_blocks"), [pytest.param("bert", 4, marks=pytest.mark.sweep), ("short vit", 5)])
def test_interpreted_kernels_of_blocks_of_rows_do_too(kind: str, in_blocks: int) -> None:
    """The gradients of q, k, v and up are summed into biases; that of a ViT's last linear comes of no norm."""
    found = result_of("run_delayed", "--merged", kind, interpret=True)
    assert found["statistics"].count("down blocks of 8 rows") == in_blocks
    assert len([name for name in found["differences"] if name.startswith("amax")]) == 4 + 6
    assert max(found["differences"].values()) < ROUNDINGS * 2.0**-24, found["differences"]
