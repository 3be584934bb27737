"""What people do in training loops keeps working: checkpointing, dropout, mutation, views, dynamic shapes, graph breaks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from tests.support.measure import compiled, gradient_sqnr, gradients, kept_bytes, llama_case
from tests.support.reference import sqnr_db


class MLP(nn.Module):
    def __init__(self, size: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.norm, self.dropout = nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def data(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape).requires_grad_(grad)


def worst(model: nn.Module, args: tuple[Tensor, ...], **options: object) -> float:
    return min(gradient_sqnr(model, compiled(model, **options), args).values())


def test_checkpointing_is_respected() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    model, x = Checkpointed(), data(128, 64)
    fn = compiled(model)
    kept = kept_bytes(model, fn, (x,))
    scales, statistics = 128 * 2, 2 * 128 * 4
    assert kept == x.numel() + scales + statistics, (
        "the block's input alone is kept, as codes, with the norm's statistics"
    )
    assert not any("var_mean" in s.reason for s in fp8compile.report(fn).skips)
    assert worst(model, (x,)) > 30
    model.block.norm = nn.Identity()  # type: ignore[assignment]
    torch._dynamo.reset()
    kept = kept_bytes(model, compiled(model), (x,))
    assert kept <= x.numel() + 128 * 2, "the block's input alone is kept, as codes"
    assert worst(model, (x,)) > 23


def test_dropout_masks_are_made_again_from_their_seed() -> None:
    model, x = MLP(dropout=0.3), data(128, 64)
    fn = compiled(model, **{"debug.codegen": "inductor"})
    torch.manual_seed(5)
    got = gradients(model, fn, (x,))
    torch._dynamo.reset()
    torch.manual_seed(5)
    plain = gradients(model, compiled(model, preset="off", **{"debug.codegen": "inductor"}), (x,))
    assert min(sqnr_db(plain[n], got[n]) for n in plain) > 23, "another mask would leave about 0 dB"
    assert any("gt" in r.origin.op for r in fp8compile.report(fn).recomputed)


def test_recomputation_alone_changes_no_gradient() -> None:
    model, x = MLP(dropout=0.3), data(128, 64)
    torch.manual_seed(5)
    with torch._inductor.config.patch(disabled_passes="encode_saved"):
        got = gradients(model, compiled(model, **{"debug.codegen": "inductor"}), (x,))
    torch._dynamo.reset()
    torch.manual_seed(5)
    plain = gradients(model, compiled(model, preset="off", **{"debug.codegen": "inductor"}), (x,))
    assert all(torch.equal(got[n], plain[n]) for n in plain)


def test_batch_norm_statistics_are_updated() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))

    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    x = data(4, 4, 16, 16)
    compiled(model)(x).sum().backward()
    twin(x).sum().backward()
    assert torch.allclose(model[1].running_mean, twin[1].running_mean, atol=1e-6)
    assert int(model[1].num_batches_tracked) == 1
    assert worst(model, (x,)) > 20


def test_an_input_mutated_in_the_forward() -> None:
    class Counts(MLP):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
            seen.add_(x.detach().mean())
            return super().forward(x) * seen

    model, x, seen = Counts(), data(128, 64), torch.ones(())
    compiled(model)(x, seen).sum().backward()
    assert torch.allclose(seen, 1 + x.detach().mean())


def test_a_view_returned_and_overwritten_by_the_caller() -> None:
    class Views(MLP):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = F.gelu(self.up(x))
            return self.down(h), h[:2]

    model, x = Views(), data(128, 64)
    out, view = compiled(model)(x)
    expected = torch.autograd.grad(model(x)[0].sum(), [model.down.weight])[0]
    with torch.no_grad():
        view.zero_()
    got = torch.autograd.grad(out.sum(), [model.down.weight])[0]
    assert sqnr_db(expected, got) > 25, "the backward sees the values of the forward, not the overwritten ones"


def test_an_output_that_is_also_kept() -> None:
    class Both(MLP):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = torch.sigmoid(self.up(x))
            return self.down(h), h

    model, x = Both(), data(128, 64)
    out, hidden = compiled(model)(x)
    (out.sum() + hidden.square().sum()).backward()
    reference = Both()
    reference.load_state_dict(model.state_dict())
    out, hidden = reference(x)
    (out.sum() + hidden.square().sum()).backward()
    assert sqnr_db(reference.up.weight.grad, model.up.weight.grad) > 25


def test_dynamic_batch_and_sequence_compile_once() -> None:
    layer, _ = llama_case(hidden=64, ffn=172, heads=4)
    fn = torch.compile(
        layer, backend="fp8compile", options={"debug.codegen": "eager", "saved.min_numel": 0}, dynamic=True
    )
    for batch, seq in ((2, 32), (3, 48), (5, 17)):
        args = (
            data(batch, seq, 64).bfloat16().detach().requires_grad_(),
            *(torch.randn(seq, 16).bfloat16() for _ in "cs"),
        )
        assert min(gradient_sqnr(layer, fn, args).values()) > 20, (batch, seq)
    assert len(fp8compile.report(fn).graphs) == 1, "one graph serves every size"


def test_both_sides_of_a_graph_break_are_rewritten_and_reported() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = MLP(), MLP()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model, x = Broken(), data(128, 64)
    assert worst(model, (x,)) > 22
    report = fp8compile.report(model)
    assert len(report.graphs) == 2 and all(g.notes.saved for g in report.graphs)
    assert {s.origin.module.split(".")[0] for s in report.saved} >= {"first", "second"}


def test_compiled_autograd() -> None:
    model, x = MLP(), data(128, 64)
    fn = compiled(model)
    expected = torch.autograd.grad(model(x).sum(), [model.up.weight])[0]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        fn(x).sum().backward()
    assert sqnr_db(expected, model.up.weight.grad) > 23


def test_double_backward_is_refused_by_name() -> None:
    model, x = MLP(), data(128, 64)
    (gradient,) = torch.autograd.grad(compiled(model)(x).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_retained_graphs_give_the_same_gradient_twice() -> None:
    model, x = MLP(), data(128, 64)
    loss = compiled(model)(x).sum()
    first = torch.autograd.grad(loss, [model.up.weight], retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, [model.up.weight])[0])


def test_inference_is_not_rewritten_and_says_so() -> None:
    model = MLP()
    fn = compiled(model)
    with torch.no_grad():
        x = data(128, 64, grad=False)
        assert torch.equal(fn(x), compiled(model, preset="off")(x))
    report = fp8compile.report(fn)
    assert report.graphs[0].kind == "inference"
    assert "inference graph" in str(report)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("saved_format", ["auto", "e4m3", "int8"])
def test_a_non_finite_activation_reaches_the_gradients(bad: float, saved_format: str) -> None:
    class Poisoned(MLP):
        def forward(self, x: Tensor, poison: Tensor) -> Tensor:  # type: ignore[override]
            h = self.up(x) + poison
            # the loss below never sees the poisoned element: only what is saved for backward does
            return self.down(torch.where(torch.isfinite(h), h, 0.0)) + 0 * self.down(h * h)

    model, x = Poisoned(), data(128, 64)
    poison = torch.zeros(128, 256)
    poison[3, 5] = bad
    out = compiled(model, saved=saved_format)(x, poison)
    out.nan_to_num().sum().backward()
    assert not torch.isfinite(model.down.weight.grad).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wide_and_complex_models_are_left_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 64, dtype=dtype, requires_grad=True)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x @ self.weight).abs().sum()

    model, x = Product(), torch.randn(128, 64, dtype=dtype)
    got = torch.autograd.grad(compiled(model)(x), [model.weight])[0]
    assert torch.allclose(got, torch.autograd.grad(model(x), [model.weight])[0])
    report = fp8compile.report(model)
    assert not report.saved and any("is left alone" in s.reason for s in report.skips)


def test_empty_and_scalar_tensors() -> None:
    model = MLP()
    fn = compiled(model, **{"saved.min_numel": 0})
    fn(data(0, 64)).sum().backward()
    assert torch.equal(model.up.weight.grad, torch.zeros_like(model.up.weight))

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * self.gain) ** 2

    assert worst(Scalar(), (data(),), **{"saved.min_numel": 0}) > 20


def test_a_frozen_weight_gets_no_gradient() -> None:
    model, x = MLP(), data(128, 64)
    model.up.requires_grad_(False)
    assert worst(model, (x,)) > 22
    assert model.up.weight.grad is None


def test_autocast_keeps_fp32_weights_and_encodes_activations() -> None:
    model, x = nn.Sequential(MLP(), MLP()), data(128, 64)

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)

    wrapped = Autocast()
    fn = compiled(wrapped)
    assert min(gradient_sqnr(model, lambda x: fn(x), (x,)).values()) > 20
    report = fp8compile.report(fn)
    assert report.saved_bytes < 0.6 * report.saved_bytes_plain
    assert not any("weight" in s.name for s in report.saved)


def test_user_written_fp8_code_is_untouched() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.register_buffer("amax", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.amax.copy_(torch.maximum(self.amax, x.detach().abs().amax()))
            scale = 448.0 / self.amax
            codes = (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            return (codes.float() / scale) @ self.weight

    model, x = Own(), data(128, 64, grad=False)
    out = compiled(model)(x)
    out.sum().backward()
    twin = Own()
    twin.load_state_dict({"weight": model.weight.detach(), "amax": torch.zeros(())})
    expected = twin(x)
    expected.sum().backward()
    assert torch.equal(out, expected) and torch.equal(model.amax, twin.amax)
    assert not any("float8" in s.dtype for s in fp8compile.report(model).saved)
