"""save_normalised: golden, contract, numbers, declines."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import fp8compile
from fp8compile.analysis.sensitivity.error import NORMALISED
from fp8compile.fx.graph import COPY_OF
from fp8compile.fx.partition import PartitionedGraph
from fp8compile.passes.save_normalised import save_normalised
from fp8compile.recipe.context import Context
from fp8compile.recipe.recipe import Recipe
from tests.passes.test_save_sums import Residual as Summed
from tests.support.graphs import backward_of, split_of
from tests.support.measure import compiled, gradient_sqnr
from tests.support.reference import sqnr_db

aten = torch.ops.aten
LATER = "recompute_for_budget,encode_saved"


class Residual(Summed):
    """x + a(x) is normalised; the cut saves a(x), which takes as many bytes and is added up again."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        return x + self.b(F.rms_norm(x, (64,)))


class Sandwich(nn.Module):
    """A norm behind a norm, whose gain has one weight of 100: the first one's input is in the second's, and its gradient."""

    def __init__(self, weight: float = 100.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)
        self.first, self.second = nn.RMSNorm(128), nn.RMSNorm(128)
        self.first.weight.data[3] = weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(self.second(h + self.first(h)))


class Scaled(nn.Module):
    """A gain a channel, one of them K, between a linear and a norm."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.a, self.gain, self.norm, self.b = (
            nn.Linear(64, 128),
            nn.Parameter(torch.ones(128)),
            nn.RMSNorm(128),
            nn.Linear(128, 64),
        )
        self.gain.data[3] = largest

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x) * self.gain))


class Masked(nn.Module):
    """A masked value that a norm reads, and behind it a gain of 300 and another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 128), nn.Linear(128, 64)
        self.first, self.second = nn.LayerNorm(128), nn.RMSNorm(128, eps=1e-5)
        self.register_buffer("gain", torch.ones(128))
        self.gain[3] = 300.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.where(torch.arange(x.shape[0])[:, None] % 2 == 0, self.a(x), 0.0)
        return self.b(self.second(self.first(h) * self.gain))


def split(
    model: nn.Module, disabled: str = LATER, dtype: torch.dtype = torch.bfloat16, **options: object
) -> PartitionedGraph:
    torch._dynamo.reset()
    x = torch.randn(128, 64, dtype=dtype).requires_grad_()
    return split_of(model.to(dtype), x, disabled=disabled, linears="off", **options)  # type: ignore[arg-type]


def saved(found: PartitionedGraph) -> list[str]:
    return [e.forward.name for e in found.edges if e.is_tensor and not found.caller_owns(e.forward)]


def test_golden_what_reads_the_sum() -> None:
    lines = backward_of(split(Residual())).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if "add" in line.split(":")[0] or "(add," in line),
        """\
add_6: bfloat16[128, 64]
add_3: float32[128, 64] = add(mul_2, mul_6)
add_4: bfloat16[128, 64] = add(tangents_1, convert_element_type_11)
add_5: bfloat16[128, 64] = add(add_4, mm_5)
return mm_4, add_5, mm_2""",
    )


def test_the_sum_is_saved_instead_of_the_matmul_s_result() -> None:
    before, after = split(Residual(), f"{LATER},save_normalised"), split(Residual())
    assert "mm" in saved(before) and not any(name.startswith("add") for name in saved(before))
    assert any(name.startswith("add") for name in saved(after)) and "mm" not in saved(after)
    assert after.saved_bytes() == before.saved_bytes()


def test_a_sum_in_fp32_is_no_copy() -> None:
    """Else the forward adds it up anew wherever it is read: a ViT's first sums, which read an image's patches."""
    for dtype, copied in ((torch.bfloat16, True), (torch.float32, False)):
        [sum_] = [e.forward for e in split(Residual(), dtype=dtype).edges if e.forward.name.startswith("add")]
        assert (COPY_OF in sum_.meta) == copied and (len(sum_.users) == 1) == copied


def test_it_is_idempotent() -> None:
    found = split(Residual())
    edges = [(e.forward.name, e.backward.name) for e in found.edges]
    save_normalised(found, Context(Recipe(linears="off")))
    assert [(e.forward.name, e.backward.name) for e in found.edges] == edges


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_the_forward_stays_as_it_was_to_the_bit(codegen: str, dtype: torch.dtype) -> None:
    model, x = Residual().to(dtype), torch.randn(128, 64, dtype=dtype).requires_grad_()
    outputs = []
    for preset in ("off", "default"):
        torch._dynamo.reset()
        outputs.append(
            compiled(model, preset=preset, linears="off", **{"saved.min_numel": 0, "debug.codegen": codegen})(x)
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("weight", [1.0, 100.0, 1000.0])
def test_a_sandwich_of_norms(weight: float) -> None:
    """11.9 dB at a weight of 100 where the sum is made again from codes."""
    torch.manual_seed(0)
    model, x = Sandwich(weight), torch.randn(256, 64)
    found = gradient_sqnr(
        model, compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"}), (x,)
    )
    assert min(found.values()) > 20, found


# ------------------------------------------------------------------------------------------------ where it declines


@pytest.mark.parametrize("largest", [10.0, 100.0, 1000.0])
def test_what_a_parameter_scales_stays_exact(largest: float) -> None:
    """-7 dB at 100 and -20 at 1000 where codes of a(x) are scaled: the gradient of what is small is what they lose."""
    torch.manual_seed(0)
    model, x = Scaled(largest), torch.randn(256, 64)
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    fn = compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"})
    fn(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and sqnr_db(q.grad, p.grad) > 60, name
    assert "addmm" in saved(split(model)), "and not the product"


def test_what_is_made_of_a_copy_is_known_to_be_normalised() -> None:
    """20 dB, and -17 in a random program, where a masked value is saved as a copy that the second norm's input is made of."""
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(256, 64)
    found = gradient_sqnr(
        model, compiled(model, linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"}), (x,)
    )
    assert min(found.values()) > 30, found


def test_the_reason_stands_in_the_report() -> None:
    fn = compiled(Scaled(10.0), linears="off", **{"saved.min_numel": 0, "debug.codegen": "eager"})
    fn(torch.randn(256, 64)).sum().backward()
    assert NORMALISED in {skip.reason for skip in fp8compile.report(fn).skips}


def test_where_nothing_is_stored_nothing_is_changed() -> None:
    options = {"linears": "off", "saved": "off", "saved.min_numel": 0}
    fn = compiled(Residual().bfloat16(), **options)
    fn(torch.randn(128, 64, dtype=torch.bfloat16).requires_grad_()).sum().backward()
    assert not fp8compile.report(fn).saved


def test_what_no_norm_reads_is_left() -> None:
    class Plain(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x)
            return x + self.b(x * x)

    assert not any(name.startswith("add") for name in saved(split(Plain())))
