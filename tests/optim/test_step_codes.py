"""A step that also writes the codes of the new weight: they are those of the weight as it is stored, and none is clipped."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.numerics.delayed import quantize_under
from fp8compile.numerics.formats import E4M3
from fp8compile.optim import code_writer
from fp8compile.optim.exchange import WrittenWeight, exchange
from fp8compile.optim.step_codes import Wanted

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [  # dtype, master, the dtype that graphs encode from
    (FP32, "none", FP32),
    (FP32, "none", BF16),
    (BF16, "none", BF16),
    (BF16, "split", BF16),
    (BF16, "fp32", BF16),
    (BF16, "fp32", FP32),
    (FP16, "none", FP16),
    (FP16, "split", FP16),
]
SHAPES = [
    (48, 256),
    (32, 208),
    (64, 64),
    (16, 128),
]  # groups, a short one in each row, short rows, fewer than 4096 elements


def asked(p: nn.Parameter, dtype: torch.dtype, transposed: bool = True, by_rows: bool = True) -> nn.Parameter:
    exchange.ask(p, Wanted(dtype, by_rows, transposed), lambda: None)
    return p


def written(p: Tensor) -> WrittenWeight:
    found = exchange.of(p)
    assert found is not None
    return found


def same_codes(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def holds(p: nn.Parameter, dtype: torch.dtype, precise: Tensor) -> None:
    """All that was left of a weight is what one gets from the weight."""
    left, weight = written(p), p.detach().to(dtype)
    codes = quantize_under(weight, left.inv_scale, E4M3)
    assert same_codes(left.by_rows, codes) and same_codes(left.transposed, codes.t().contiguous())
    amax = torch.maximum(weight.float().abs().amax(), precise.abs().amax())
    assert torch.equal(left.known[0], amax) and not left.clipped
    assert bool(amax <= E4M3.max * left.inv_scale) and float(left.inv_scale.log2()) % 1 == 0


ALL = [(shape, kind, compiled) for compiled in (False, True) for shape in SHAPES for kind in KINDS]
IN_CI = ((SHAPES[0], KINDS[0]), (SHAPES[0], KINDS[4]), (SHAPES[1], KINDS[2]))  # compiled; the rest takes minutes


@pytest.mark.parametrize(
    ("shape", "kind", "compiled"),
    [each if not each[2] or each[:2] in IN_CI else pytest.param(*each, marks=pytest.mark.sweep) for each in ALL],
    ids=str,
)
def test_codes_are_those_of_the_stored_weight(shape: tuple[int, int], kind: Any, compiled: bool) -> None:
    """Of every dtype and master, with gradients that jump by ten decades up and down."""
    dtype, master, taken = kind
    torch.manual_seed(0)
    p = asked(nn.Parameter((0.02 * torch.randn(shape)).to(dtype)), taken)
    plain = nn.Parameter(p.detach().clone())
    ours, without = (
        optim.AdamW([each], 3e-3, master=master, compiled=compiled, weight_codes=codes)
        for each, codes in ((p, True), (plain, False))
    )
    for i in range(5):
        g = torch.randn(shape) * 10.0 ** torch.tensor([-4, 3, -4, 0, 4])[i]
        p.grad, plain.grad = g.to(dtype), g.to(dtype)
        ours.step()
        without.step()
        plan, tensors = ours.step_function(p)
        holds(p, taken, plan._precise(tensors))
        assert compiled or torch.equal(p, plain), "the update itself is the same; compiled, but for fused roundings"
    for name, t in without.state[plain].items():
        assert compiled or torch.equal(t.float(), ours.state[p][name].float()), name


FORMATS = ["fp32", "bf16", "e4m3_expanded", ("dynamic_tree", "e4m3_expanded"), "int8_companded", "e5m2_expanded"]


@pytest.mark.parametrize("make", ["AdamW", "Adam", "Lion", "RMSprop"])
@pytest.mark.parametrize("state_format", FORMATS, ids=str)
def test_no_step_gets_past_the_bound_from_states_that_are_codes(make: str, state_format: Any) -> None:
    """The worst gradient for each element of the states as they are decoded, at a learning rate that makes the step all."""
    torch.manual_seed(0)
    p = asked(nn.Parameter(1e-3 * torch.randn(32, 256)), FP32)
    options: dict[str, Any] = {"momentum": 0.9} if make == "RMSprop" else {}
    optimizer = getattr(optim, make)(
        [p], 0.3, state_format=state_format, compiled=False, weight_codes=True, **options
    )
    used = 0.0
    for i in range(12):
        p.grad = torch.randn(32, 256) * 10.0 ** (4 * torch.rand(32, 1) - 2)
        if make in ("Adam", "AdamW") and i:
            plan, tensors = optimizer.step_function(p)
            m, v = plan.decoded(tensors, p.shape).values()
            worst = 0.1 * 0.999 * v / (0.001 * 0.9 * m)
            p.grad = torch.where(worst.isfinite(), worst, torch.zeros(()))
        before = p.detach().abs().amax()
        optimizer.step()
        holds(p, FP32, p)
        used = max(used, float(p.detach().abs().amax() / (E4M3.max * written(p).inv_scale)))
        assert bool(before.isfinite())
    assert used > 0.5, "the scale is no coarser than the power of two needs"


@pytest.mark.parametrize(
    "state_format", [f if f in FORMATS[1:3] else pytest.param(f, marks=pytest.mark.sweep) for f in FORMATS], ids=str
)
def test_reach_is_that_of_the_states_as_they_are_stored(state_format: Any) -> None:
    """In generated code too, where it is computed beside the encoding: from codes, not from what they were rounded from."""
    torch.manual_seed(0)
    p = asked(nn.Parameter(torch.randn(32, 256)), FP32)
    optimizer = optim.AdamW([p], 1e-3, state_format=state_format, weight_codes=True)
    for _ in range(3):
        p.grad = torch.randn(32, 256) * 10.0 ** (6 * torch.rand(32, 256) - 3)
        optimizer.step()
        plan, tensors = optimizer.step_function(p)
        m, v = plan.decoded(tensors, p.shape).values()
        reached = (m.abs() / (v + 2.0**-120).sqrt()).amax()
        assert float(written(p).known[1]) == pytest.approx(float(reached), rel=code_writer.NEAR)


def test_each_step_s_codes_are_new_tensors_and_none_is_held() -> None:
    """A backward that is still to come has those of its forward; nor is the first gradient held."""
    p = asked(nn.Parameter(torch.randn(64, 128)), FP32)
    optimizer, seen = optim.AdamW([p], 1e-3, weight_codes=True, compiled=False), []
    for _ in range(3):
        p.grad = torch.randn(64, 128)
        grad = weakref.ref(p.grad.untyped_storage())
        optimizer.step()
        p.grad = None
        left = written(p)
        seen.append((left.by_rows, left.by_rows.clone()))  # type: ignore[union-attr]
        assert grad() is None
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in seen)
    assert len({a.data_ptr() for a, _ in seen}) == 3
    codes = weakref.ref(seen[0][0])
    del seen, left
    assert codes() is None


def test_layouts_are_those_that_are_asked_for() -> None:
    for by_rows, transposed in itertools.product((False, True), repeat=2):
        p = asked(nn.Parameter(torch.randn(64, 128)), FP32, transposed, by_rows)
        optimizer = optim.AdamW([p], 1e-3, weight_codes=True, compiled=False)
        p.grad = torch.randn(64, 128)
        optimizer.step()
        assert (written(p).by_rows is not None, written(p).transposed is not None) == (by_rows, transposed)


def test_zero_weights_and_a_learning_rate_of_zero() -> None:
    p = asked(nn.Parameter(torch.zeros(64, 128)), FP32)
    optimizer = optim.AdamW([p], 0.0, weight_codes=True)
    for lr in (0.0, 1e-2, torch.tensor(0.3)):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = torch.randn(64, 128)
        optimizer.step()
        holds(p, FP32, p)


def test_what_is_not_finite_becomes_nan_codes() -> None:
    """Its own code in the step that makes it, and every code once the scale knows."""
    p = asked(nn.Parameter(torch.randn(64, 128)), FP32)
    optimizer = optim.AdamW([p], 1e-3, state_format="fp32", weight_codes=True)
    nans = []
    for bad in (0.0, torch.inf, 0.0):
        p.grad = torch.randn(64, 128)
        p.grad[3, 5] += bad
        optimizer.step()
        nans.append(int(written(p).by_rows.float().isnan().sum()))  # type: ignore[union-attr]
    assert nans == [0, 1, 64 * 128] and bool(written(p).known[0].isnan())


def test_changes_between_steps_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the weight, of a state, by loading: the next step's scale is that of what there is."""
    p = asked(nn.Parameter(torch.randn(64, 128)), FP32)
    optimizer, measured = optim.AdamW([p], 1e-3, weight_codes=True, compiled=False), list[int]()

    def step() -> None:
        p.grad = torch.randn(64, 128)
        optimizer.step()
        holds(p, FP32, p)

    def count(plan: Any, *args: Any) -> Any:
        measured.append(len(args))
        return original(plan, *args)

    original = code_writer.UpdatePlan.measured
    monkeypatch.setattr(code_writer.UpdatePlan, "measured", count)
    for change, times in (
        (lambda: None, 2),  # the first step has nothing to go by
        (lambda: None, 1),
        (lambda: p.detach().mul_(100), 2),
        (lambda: optimizer.state[p]["exp_avg_sq.e4m3_expanded.amax"].mul_(1e-6), 2),
        (lambda: optimizer.load_state_dict(optimizer.state_dict()), 2),
        (lambda: setattr(p, "data", p.data * 100), 2),
    ):
        measured.clear()
        change()
        step()
        assert len(measured) == times  # one of them by the step itself, of what it made


REASONS: list[tuple[Any, torch.dtype, torch.dtype, dict[str, Any], str | None]] = [
    (optim.AdamW, BF16, BF16, {}, None),
    (optim.SGD, FP32, FP32, {}, "as large as its gradient"),
    (optim.LAMB, FP32, FP32, {}, "as large as its gradient"),
    (optim.AdamW, FP32, FP32, {"eps": 0.0}, "eps"),
    (optim.AdamW, FP16, FP16, {"master": "fp32"}, "float16"),
    (optim.AdamW, FP32, FP16, {}, "float16"),
    (optim.AdamW, BF16, FP16, {}, "float16"),
]


@pytest.mark.parametrize(("make", "dtype", "taken", "options", "why"), REASONS)
def test_a_step_that_writes_none_says_why(
    make: Any, dtype: torch.dtype, taken: torch.dtype, options: dict[str, Any], why: str | None
) -> None:
    p, other = asked(nn.Parameter(torch.randn(64, 128).to(dtype)), taken), nn.Parameter(torch.randn(4, 4))
    optimizer = make([p, other], 1e-3, weight_codes=True, compiled=False, **options)
    for each in (p, other):
        each.grad = torch.randn_like(each)
    optimizer.step()
    group = optimizer.param_groups[0]
    found = optimizer._writer.why_not(p, group)
    assert (found is None) == (why is None) == (exchange.of(p) is not None)
    assert why is None or why in found
    assert "no graph has asked" in optimizer._writer.why_not(other, group)
    codes = optimizer.report().parameters[0].codes
    assert codes == (f"not written: {found}" if why else "written by the step")


def test_the_option_is_checked_and_off_by_default() -> None:
    with pytest.raises(ValueError, match="weight_codes"):
        optim.AdamW([nn.Parameter(torch.ones(2))], weight_codes="yes")  # type: ignore[arg-type]
    p = asked(nn.Parameter(torch.randn(64, 128)), FP32)
    optimizer = optim.AdamW([p], 1e-3, compiled=False)
    p.grad = torch.randn(64, 128)
    optimizer.step()
    assert exchange.of(p) is None
