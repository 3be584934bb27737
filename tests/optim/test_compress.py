"""compress: what is encoded and how, what is refused, options that change, numbers in tensors, 16 bits, the compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp8compile
from fp8compile import optim
from fp8compile.numerics.states.registry import ALIASES, SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_codec
from tests.support.compressing import (
    SHAPES,
    assert_same_way,
    compressed,
    formats,
    of_torch,
    parameters,
    values,
    with_gradients,
)
from tests.support.optim_models import batches, small_model, train


@pytest.mark.parametrize("fmt", [*(f for f in STATE_FORMATS if f not in (*SIGNED_ONLY, *UNSIGNED_ONLY)), *ALIASES])
def test_every_format_takes_the_first_step_of_torch(fmt: str) -> None:
    """Whatever the format: states are read before they are encoded."""
    (ours, optimizer), (theirs, plain) = compressed("AdamW", fmt, lr=1e-2), of_torch("AdamW", lr=1e-2)
    before = values(ours)
    with_gradients(0, ours, theirs)
    optimizer.step()
    plain.step()
    assert_same_way(ours, theirs, before, 1)
    signed, unsigned = ALIASES.get(fmt, (fmt, fmt))
    assert formats(optimizer, "exp_avg")[0] == signed and formats(optimizer, "exp_avg_sq")[0] == unsigned
    assert formats(optimizer, "exp_avg")[2] == ("bf16" if fmt == "bf16" else "fp32")  # a small one


def test_its_states_are_plain_tensors_by_format_and_part_and_begin_at_the_first_step() -> None:
    ours, optimizer = compressed("AdamW")
    assert not optimizer.state
    with_gradients(0, ours)
    ours[1].grad = None
    optimizer.step()
    parts = {
        f"{state}.e4m3_expanded.{part}" for state in ("exp_avg", "exp_avg_sq") for part in ("codes", "amax", "k")
    }
    assert {*optimizer.state[ours[0]]} == {"step", *parts}
    assert {*optimizer.state[ours[2]]} == {"step", "exp_avg.fp32.value", "exp_avg_sq.fp32.value"}
    assert {type(t) for t in optimizer.state[ours[0]].values()} == {Tensor} and ours[1] not in optimizer.state


def test_it_is_an_optimizer_of_the_class_that_it_was_and_of_ours() -> None:
    _, optimizer = compressed("AdamW")
    assert isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, optim.EncodedOptimizer)
    assert type(optimizer).__name__ == "AdamW" and repr(optimizer).startswith("AdamW (")
    assert type(compressed("AdamW")[1]) is type(optimizer)


def test_states_take_the_bits_that_ours_take() -> None:
    (ours, optimizer), theirs = compressed("AdamW"), parameters()
    of_ours = optim.AdamW(theirs, compiled=False)
    with_gradients(0, ours, theirs)
    optimizer.step()
    of_ours.step()
    found, expected = optimizer.report(), of_ours.report()
    assert found.bytes_by_format == expected.bytes_by_format
    bits = [state.bits for state in found.parameters[0].states]
    assert len(bits) == 2 and all(8 < each <= 8.35 for each in bits)


def test_states_that_are_there_are_encoded_once_and_steps_kept() -> None:
    ps, plain = of_torch("Adam")
    optimizer: Any = plain
    for step in range(2):
        with_gradients(step, ps)
        optimizer.step()
    before = [dict(optimizer.state[p]) for p in ps]
    fp8compile.optim.compress(optimizer, compiled=False)
    decoded = optimizer.export_fp32_state_dict()["state"]
    for index, (p, old) in enumerate(zip(ps, before, strict=True)):
        assert torch.equal(optimizer.state[p]["step"], old["step"])
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codec = state_codec("e4m3_expanded" if p.numel() >= 4096 else "fp32", signed=signed)
            assert torch.equal(decoded[index][name], codec.decode(codec.encode(old[name]), p.shape))


def test_compress_again_takes_another_format_and_goes_on() -> None:
    ours, optimizer = compressed("AdamW", "e4m3")
    with_gradients(0, ours)
    optimizer.step()
    assert fp8compile.optim.compress(optimizer, "int8", compiled=False) is optimizer
    assert formats(optimizer, "exp_avg") == ["int8", "int8", "fp32"]
    assert [float(optimizer.state[p]["step"]) for p in ours] == [1.0] * 3
    decoded = optimizer.export_fp32_state_dict()["state"][0]["exp_avg"]
    fp8compile.optim.compress(optimizer, "fp32", compiled=False)
    assert torch.equal(optimizer.state[ours[0]]["exp_avg.fp32.value"], decoded)
    with_gradients(1, ours)
    optimizer.step()


def test_what_keeps_fp32_is_decided_as_in_our_optimizers() -> None:
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    optim.override(model[2], state_format="bf16")
    optimizer = fp8compile.optim.compress(
        torch.optim.SGD(model.parameters(), momentum=0.9), model=model, compiled=False
    )
    with_gradients(0, [*model.parameters()])
    optimizer.step()
    assert formats(optimizer, "momentum_buffer") == ["fp32", "e4m3_expanded", "fp32", "bf16", "bf16"]
    reasons = [each.reason for each in optimizer.report().parameters]  # type: ignore[attr-defined]
    assert reasons[:2] == ["an embedding", None] and "fewer than 4096" in reasons[2]
    each = zip(parameters(SHAPES[:1] * 2), ("int8", "fp32"), strict=True)
    by_group = fp8compile.optim.compress(
        torch.optim.AdamW([{"params": [p], "state_format": f} for p, f in each]), compiled=False
    )
    named = torch.optim.AdamW(nn.Linear(128, 64).named_parameters())
    fp8compile.optim.compress(named, overrides={"weight": "int8"}, compiled=False)
    for grouped in (by_group, named):
        with_gradients(0, [p for group in grouped.param_groups for p in group["params"]])
        grouped.step()
        assert formats(grouped, "exp_avg") == ["int8", "fp32"]


def test_what_would_keep_every_rounding_or_a_root_of_less_than_nothing_stays_exact() -> None:
    for name, options, kinds in (
        ("Adagrad", {}, {"sum": "fp32"}),
        ("Adam", {"amsgrad": True}, {"exp_avg": "e4m3_expanded", "exp_avg_sq": "fp32", "max_exp_avg_sq": "fp32"}),
        ("RMSprop", {"centered": True}, {"square_avg": "fp32", "grad_avg": "fp32"}),
        ("RMSprop", {"momentum": 0.9}, {"square_avg": "e4m3_expanded", "momentum_buffer": "e4m3_expanded"}),
    ):
        ours, optimizer = compressed(name, **options)
        with_gradients(0, ours)
        optimizer.step()
        assert {state: formats(optimizer, state)[0] for state in kinds} == kinds, name


def replaced() -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters())
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return optimizer


def begun(value: float) -> torch.optim.Optimizer:
    ps, optimizer = of_torch("AdamW")
    with_gradients(0, ps)
    optimizer.step()
    optimizer.state[ps[1]]["exp_avg"].fill_(value)
    return optimizer


def adamw(**options: Any) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.AdamW(parameters(), **options)


def of_dtype(dtype: torch.dtype) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.SGD([*parameters(), nn.Parameter(torch.zeros(64, 64, dtype=dtype))], momentum=0.9)


REFUSED: list[tuple[Callable[[], torch.optim.Optimizer], dict[str, Any], str]] = [
    (adamw(fused=True), {}, "fused=False"),
    (adamw(differentiable=True), {}, "differentiable=False"),
    (lambda: optim.AdamW(parameters()), {}, "encoded already"),
    (adamw(), {"state_format": "e9"}, "no state format 'e9'"),
    (adamw(), {"state_format": 3}, "state_format 3"),
    (adamw(), {"master": "bf16"}, "master='bf16'"),
    (adamw(), {"model": 3}, "model=3"),
    (adamw(), {"seed": "a"}, "seed='a'"),
    (adamw(), {"compiled": 1}, "compiled=1"),
    (adamw(), {"overrides": {"*.bias": "fp32"}}, "these parameters have none"),
    (replaced, {}, "the step of this AdamW was replaced"),
    (of_dtype(torch.complex64), {}, "parameter 3 .*complex64"),
    (of_dtype(torch.float64), {}, "parameter 3 .*float64"),
    (lambda: torch.optim.AdamW([{"params": parameters(), "state_format": "e9"}]), {}, "no state format 'e9'"),
    (lambda: begun(torch.nan), {}, "parameter 1: exp_avg holds NaN"),
    (lambda: fp8compile.optim.compress(begun(0.0), compiled=False), {"overrides": {"*.bias": "fp32"}}, "have none"),
]


@pytest.mark.parametrize(("build", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_it_refuses_what_it_cannot_do_and_changes_nothing(
    build: Callable[[], torch.optim.Optimizer], options: dict[str, Any], message: str
) -> None:
    optimizer = build()
    kind, names, defaults = type(optimizer), {*vars(optimizer)}, dict(optimizer.defaults)
    groups = [dict(group) for group in optimizer.param_groups]
    states = {p: dict(state) for p, state in optimizer.state.items()}
    with pytest.raises(ValueError, match=message):
        fp8compile.optim.compress(optimizer, **options)
    assert type(optimizer) is kind and {*vars(optimizer)} == names and optimizer.defaults == defaults
    assert optimizer.param_groups == groups
    assert optimizer.state.keys() == states.keys()
    assert all(optimizer.state[p][name] is t for p, state in states.items() for name, t in state.items())


class Seeded(torch.optim.SGD):
    """An attribute of its own has the name of one of ours."""

    def __init__(self, parameters: Any, seed: int = 3) -> None:
        super().__init__(parameters, lr=0.1)
        self.seed = seed


def test_an_attribute_of_its_own_is_not_overwritten() -> None:
    optimizer = Seeded([nn.Parameter(torch.ones(64, 128))])
    with pytest.raises(
        ValueError, match="Seeded has an attribute 'seed', which a compressed optimizer has for itself"
    ):
        fp8compile.optim.compress(optimizer)
    assert type(optimizer) is Seeded and optimizer.seed == 3


def test_hooks_closures_and_losses_are_as_before() -> None:
    """Hooks from before and behind compress, and those of all optimizers, are called once for each step."""
    model = small_model()
    plain, called = torch.optim.AdamW(model.parameters(), lr=1e-3), list[str]()
    plain.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer = fp8compile.optim.compress(plain, compiled=False)
    optimizer.register_step_post_hook(lambda *_: called.append("behind"))
    of_all = register_optimizer_step_post_hook(lambda *_: called.append("all"))
    [(x, y)] = batches(1)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        return loss

    try:
        first = optimizer.step(closure)  # type: ignore[arg-type]
        assert called == ["before", "behind", "all"]
        assert float(optimizer.step(closure)) < float(first)  # type: ignore[arg-type]
        fp8compile.optim.decompress(optimizer).step()
        fp8compile.optim.compress(optimizer, compiled=False).step()
        assert called == ["before", "behind", "all"] * 4
    finally:
        of_all.remove()


def test_it_trains_as_torchs_does() -> None:
    data, losses = batches(1) * 20, []
    for is_compressed in (True, False):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if is_compressed:
            fp8compile.optim.compress(optimizer, model=model, compiled=False)
        losses.append(train(model, optimizer, data))
    ours, theirs = (each[0] - each[-1] for each in losses)
    assert abs(ours - theirs) <= 0.05 * theirs  # what is off by 5 % of the way

    # and the first of them, before any codes are read, is the same
    assert losses[0][0] == losses[1][0]


def test_a_sparse_gradient_is_refused_and_nothing_begins() -> None:
    ours, optimizer = compressed("AdamW")
    with_gradients(0, ours)
    ours[1].grad = torch.eye(33, 130).to_sparse()
    before = values(ours)
    with pytest.raises(RuntimeError, match="sparse gradient"):
        optimizer.step()
    assert not optimizer.state and all(map(torch.equal, ours, before))


def test_shapes_of_any_kind() -> None:
    shapes = ((64, 128), (), (1,), (0, 128), (2, 3, 4, 5))
    for name in ("AdamW", "SGD", "NAdam", "Rprop"):
        theirs, ours = parameters(shapes), parameters(shapes)
        options = {"momentum": 0.9} if name == "SGD" else {}
        plain = getattr(torch.optim, name)(theirs, **options)
        optimizer = fp8compile.optim.compress(getattr(torch.optim, name)(ours, **options), "fp32", compiled=False)
        before = values(ours)
        for step in range(3):
            with_gradients(step, ours, theirs)
            plain.step()
            optimizer.step()
        assert_same_way(ours, theirs, before, 3)


def test_the_step_function_is_the_step() -> None:
    """Also the first one, and where a state is one number."""
    ours, optimizer = compressed("NAdam")
    for step in range(2):
        with_gradients(step, ours)
        plan, tensors = optimizer.step_function(ours[0])
        moved = plan(tensors)["param"]
        optimizer.step()
        assert torch.equal(ours[0], moved)


def test_gradients_can_be_released() -> None:
    model, twin = small_model(), small_model()
    optimizer, other = (
        fp8compile.optim.compress(torch.optim.AdamW(each.parameters()), compiled=False) for each in (model, twin)
    )
    handle = optimizer.release_gradients(model)  # type: ignore[attr-defined]
    [(x, y)] = batches(1)
    (model(x) - y).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    train(twin, other, [(x, y)])
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    handle.remove()
