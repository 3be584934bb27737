"""What passes decide where FP8 linears are emulated on a CPU is what they decide for an H100, but for what is argued here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton, which compiles what Inductor generates, exists for Linux only")

from .subprocesses import result_of

IN_CI = ("mlp, checkpointed", "lora", "vit")
SWEPT = ("bert",)

# What one side keeps and the other does not: by shape and dtype, with the reason. Orders in memory count too.
SCALE = ([], "torch.bfloat16"), ([], "torch.float32")  # emulated, a scale is kept in the dtype that it is decoded to
SEED = ([2], "torch.uint64"), ([], "torch.uint64")  # flash attention's random state: the CPU's has none
LOGSUMEXP = (([2, 2, 64], "torch.float32"),)  # flash attention on a CPU returns it transposed
STATISTICS = (([2, 64, 1], "torch.bfloat16"),)  # LayerNorm's: exact on cuda, so shared with what is FP32 already
ARGUED: dict[str, tuple[Any, ...]] = {
    "mlp, checkpointed": (),
    "lora": SCALE,
    "vit": (*SCALE, *SEED, *LOGSUMEXP),
    "bert": (*SCALE, *SEED, *LOGSUMEXP, *STATISTICS),
}
MODELS = [*IN_CI, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEPT)]


def arms(name: str) -> dict[str, Any]:
    part = IN_CI if name in IN_CI else SWEPT
    found: dict[str, Any] = result_of("run_emulated", *part)[name]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_same_tensors_are_kept(name: str) -> None:
    emulated, device = (list(arms(name)[arm]["kept"]) for arm in ("emulated", "device"))
    for each in list(emulated):
        if each in device:
            emulated.remove(each)
            device.remove(each)
    differing = [(shape, dtype) for _, shape, dtype, _ in emulated + device]
    assert [each for each in differing if each not in ARGUED[name]] == []


@pytest.mark.parametrize("name", MODELS)
def test_as_many_products_are_computed_in_each_half(name: str) -> None:
    """A product that one side makes again and the other saves would be one more in its backward."""
    emulated, device = (
        [sum(half.values()) for half in arms(name)[arm]["products"]] for arm in ("emulated", "device")
    )
    assert emulated == device
    assert any("_scaled_mm" in half for half in arms(name)["device"]["products"])
