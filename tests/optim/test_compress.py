"""compress: torch.optim's own optimizers with encoded states, whose compiled step is ours bit for bit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import optim
from fp8compile.numerics.states.registry import ALIASES, SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY, state_codec
from fp8compile.optim.compress import _plain
from fp8compile.optim.encoded_tensor import EncodedTensor
from tests.support.optim_models import batches, parameters_of, small_model, train

SHAPES = ((33, 130), (10,))  # rows of a full group and a short one, encoded; and a tensor that is kept whole
ROWS = ((32, 128), (10,))  # a row is a group


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape) * 0.1) for shape in shapes]


def with_gradients(*several: list[nn.Parameter]) -> None:
    """The same random gradients for each list, of magnitudes from 1e-3 to 10."""
    for alike in zip(*several, strict=True):
        grad = torch.randn_like(alike[0]) * 10 ** (4 * torch.rand(()) - 3)
        for p in alike:
            p.grad = grad.clone()


def stepped(optimizer: torch.optim.Optimizer, codegen: str = "eager") -> Callable[[], Any]:
    """The compiled step; by default the rewritten graph, run node by node."""
    return torch.compile(optimizer.step, backend="fp8compile", options={"codegen": codegen})  # type: ignore[return-value]


def bits_of(t: Tensor) -> Tensor:
    return t.detach().contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def assert_same_states(stock: torch.optim.Optimizer, ours: optim.EncodedOptimizer) -> None:
    states = zip(stock.state_dict()["state"].items(), ours.state_dict()["state"].items(), strict=True)
    for (key, theirs), (same, mine) in states:
        assert key == same
        for name, part in theirs.items():
            same_part = mine[name if name in mine else f"{name}.fp32.value"]
            assert torch.equal(bits_of(part), bits_of(same_part)), (key, name)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"shapes": SHAPES}),
    ("AdamW", {"lr": torch.tensor(1e-2), "betas": (0.3, 0.9), "weight_decay": 0.1, "maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "lr": torch.tensor(0.1)}),
]


IN_CI = (CASES[1], CASES[4])


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.sweep) for case in CASES],
    ids=lambda v: v if isinstance(v, str) else "-".join(v),
)
def test_fifty_steps_are_ours_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    """Every parameter and every tensor of the states; the learning rate moves where it is a tensor, in one compilation."""
    options = dict(options)
    shapes, lr = options.pop("shapes", ROWS), options.pop("lr", 1e-2)
    theirs, mine = parameters(shapes), parameters(shapes)
    rates = [lr.clone() if isinstance(lr, Tensor) else lr for _ in range(2)]
    stock = fp8compile.compress(getattr(torch.optim, name)(theirs, lr=rates[0], **options))
    ours = getattr(optim, name)(mine, lr=rates[1], **options)
    torch._dynamo.utils.counters.clear()
    step = stepped(stock, "inductor")
    for i in range(50):
        for rate in rates:
            if isinstance(rate, Tensor):
                rate.fill_(1e-2 * (1 + i / 50))
        with_gradients(theirs, mine)
        step()
        ours.step()
        assert all(torch.equal(p, q) for p, q in zip(theirs, mine, strict=True)), i
    assert_same_states(stock, ours)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("fmt", [*(f for f in STATE_FORMATS if f not in (*SIGNED_ONLY, *UNSIGNED_ONLY)), *ALIASES])
def test_every_format_gives_our_first_step(fmt: str) -> None:
    """From states of zero the step is lr sign(g), whatever the format: m and v are read before they are encoded.

    Each side rounds the update, at most lr, some 12 times, and the parameter three times.
    """
    theirs, mine = parameters(), parameters()
    stock = fp8compile.compress(torch.optim.AdamW(theirs, lr=1e-2), fmt)
    ours = optim.AdamW(mine, lr=1e-2, state_format=fmt, compiled=False)
    with_gradients(theirs, mine)
    stepped(stock)()
    ours.step()
    for p, q in zip(theirs, mine, strict=True):
        bound = 2 * 2.0**-24 * (12 * 1e-2 + 3 * q.abs().max().item())
        torch.testing.assert_close(p, q, rtol=0, atol=bound)
    formats = {value.format for value in stock.state[theirs[0]].values() if isinstance(value, EncodedTensor)}
    assert formats == ({*ALIASES[fmt]} if fmt in ALIASES else {fmt} - {"fp32"})


def test_states_take_the_bits_that_ours_take() -> None:
    shape = (256, 512)
    stock, ours = fp8compile.compress(torch.optim.AdamW(parameters((shape,)))), optim.AdamW(parameters((shape,)))
    with_gradients(ours.param_groups[0]["params"])
    ours.step()
    counts = []
    for optimizer in (stock, ours):
        [state] = (_plain(state) for state in optimizer.state.values())
        counts.append(8 * sum(t.untyped_storage().nbytes() for name, t in state.items() if name != "step"))
    assert counts[0] == counts[1] and counts[0] / (256 * 512) <= 16.7


def test_states_that_are_there_are_encoded_once_and_steps_kept() -> None:
    ps = parameters()
    stock = torch.optim.Adam(ps)
    for _ in range(2):
        with_gradients(ps)
        stock.step()
    before = [dict(stock.state[p]) for p in ps]
    fp8compile.compress(stock)
    for p, old in zip(ps, before, strict=True):
        new = stock.state[p]
        assert torch.equal(new["step"], old["step"])
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            codec = state_codec("e4m3_expanded" if p.numel() >= 4096 else "fp32", signed=signed)
            expected = codec.decode(codec.encode(old[name]), p.shape)
            value = new[name].decode() if isinstance(new[name], EncodedTensor) else new[name]
            assert isinstance(new[name], EncodedTensor) == (p.numel() >= 4096) and torch.equal(value, expected)


def test_compress_again_takes_up_new_parameters_and_another_format() -> None:
    ps = parameters()
    stock = fp8compile.compress(torch.optim.AdamW(ps[:1]), "e4m3")
    old = stock.state[ps[0]]["exp_avg"]
    stock.add_param_group({"params": ps[1:]})
    fp8compile.compress(fp8compile.compress(stock, "e4m3"), "e5m2")
    assert old.format == "e4m3" and stock.state[ps[0]]["exp_avg"].format == "e5m2" and ps[1] in stock.state
    assert len(stock._optimizer_state_dict_post_hooks) == 1


def test_what_keeps_fp32_is_decided_as_in_our_optimizers() -> None:
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    optim.override(model[2], state_format="bf16")
    stock = fp8compile.compress(torch.optim.SGD(model.parameters(), momentum=0.9), model=model)
    buffers = [stock.state[p]["momentum_buffer"] for p in model.parameters()]
    kinds = [b.format if isinstance(b, EncodedTensor) else "fp32" for b in buffers]
    assert kinds == ["fp32", "e4m3_expanded", "fp32", "bf16", "bf16"]
    groups = [
        {"params": [p], "state_format": fmt}
        for p, fmt in zip(parameters(((64, 64),) * 2), ("int8", "fp32"), strict=True)
    ]
    by_group = fp8compile.compress(torch.optim.AdamW(groups))
    assert [type(s["exp_avg"]) for s in by_group.state.values()] == [EncodedTensor, Tensor]
    named = torch.optim.AdamW(nn.Linear(128, 64).named_parameters())
    fp8compile.compress(named, overrides={"weight": "int8"})
    assert next(iter(named.state.values()))["exp_avg"].format == "int8"


class Own(torch.optim.AdamW):
    pass


def bf16() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(64, 128, dtype=torch.bfloat16))]


REFUSED: list[tuple[Callable[[], torch.optim.Optimizer], str]] = [
    (lambda: Own(parameters()), r"test_compress\.Own.*Use one of these"),
    (lambda: torch.optim.RMSprop(parameters()), r"torch\.optim\.rmsprop\.RMSprop.*fp8compile\.optim.*RMSprop"),
    (lambda: optim.AdamW(parameters()), "encoded already"),
    (lambda: torch.optim.AdamW(bf16()), "bfloat16.*Use fp8compile.optim"),
    (lambda: torch.optim.AdamW(parameters(), amsgrad=True), "Leave amsgrad out"),
    (lambda: torch.optim.AdamW(parameters(), fused=True), "fused=False"),
    (lambda: torch.optim.SGD(parameters(), momentum=0.9, differentiable=True), "differentiable=False"),
    (lambda: torch.optim.SGD(parameters(), momentum=0.9, dampening=0.1), "after a first step"),
    (lambda: torch.optim.AdamW([{"params": parameters(), "state_format": "e9"}]), "no state format 'e9'"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[message[:12] for _, message in REFUSED])
def test_it_refuses_what_it_cannot_do_and_changes_nothing(
    build: Callable[[], torch.optim.Optimizer], message: str
) -> None:
    optimizer = build()
    with pytest.raises(ValueError, match=message):
        fp8compile.compress(optimizer)
    assert not optimizer.state and not optimizer._optimizer_state_dict_post_hooks


def test_one_graph_while_a_tensor_lr_moves_and_another_for_another_float() -> None:
    for lr, graphs in ((torch.tensor(0.1), 1), (0.1, 2)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        ps = parameters()
        stock = fp8compile.compress(torch.optim.SGD(ps, lr=lr, momentum=0.9))
        schedule = torch.optim.lr_scheduler.StepLR(stock, 2)
        step = stepped(stock)
        for _ in range(4):
            with_gradients(ps)
            step()
            schedule.step()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_without_compilation_it_trains_too() -> None:
    model = small_model()
    stock = fp8compile.compress(torch.optim.AdamW(model.parameters(), lr=1e-3), model=model)
    losses = train(model, stock, batches(1) * 20)
    assert losses[-1] < 0.9 * losses[0]
    assert any(isinstance(v, EncodedTensor) for state in stock.state.values() for v in state.values())


def trained(name: str = "AdamW", steps: int = 2, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    optimizer = fp8compile.compress(getattr(torch.optim, name)(model.parameters(), **options))
    train(model, optimizer, batches(steps))
    return model, optimizer


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9, "lr": 0.1})])
def test_state_dicts_are_plain_and_interchangeable_with_ours(name: str, options: dict[str, Any]) -> None:
    _, saved = trained(name, **options)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    state_dict = torch.load(file, weights_only=True)
    _, loaded = trained(name, steps=1, **options)
    loaded.load_state_dict(state_dict)
    ours = getattr(optim, name)(small_model().parameters(), **options)
    ours.load_state_dict(state_dict)
    for optimizer in (saved, loaded):
        assert_same_states(optimizer, ours)
    loaded.load_state_dict(ours.state_dict())
    assert_same_states(loaded, ours)
    assert loaded.param_groups[0]["foreach"] is False and "state_format" not in loaded.param_groups[0]


def test_a_state_dict_of_torchs_is_encoded_and_what_it_lacks_starts_anew() -> None:
    ps = parameters()
    plain = torch.optim.AdamW(ps)
    with_gradients(ps)
    plain.step()
    state_dict = plain.state_dict()
    del state_dict["state"][1]
    stock = fp8compile.compress(torch.optim.AdamW(parameters(), foreach=True), "int8")
    stock.load_state_dict(state_dict)
    first, second = stock.state.values()
    codec = state_codec("int8", signed=True)
    expected = codec.decode(codec.encode(plain.state[ps[0]]["exp_avg"]), ps[0].shape)
    assert first["step"] == 1 and torch.equal(first["exp_avg"].decode(), expected)
    assert second["step"] == 0 and not second["exp_avg"].any()


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    _, stock = trained()
    before = {p: dict(state) for p, state in stock.state.items()}
    _, other = trained("SGD", momentum=0.9)
    for wrong in (other.state_dict(), torch.optim.AdamW(parameters()).state_dict(), {"state": {}}):
        with pytest.raises(ValueError):
            stock.load_state_dict(wrong)
        for p, state in before.items():
            assert all(stock.state[p][name] is value for name, value in state.items())


def test_decompress_gives_fp32_and_torchs_own_state_dict() -> None:
    model, stock = trained()
    expected = {p: s["exp_avg"] for p, s in stock.state.items()}
    assert fp8compile.decompress(stock) is stock
    for p, state in stock.state.items():
        assert type(state["exp_avg"]) is Tensor and torch.equal(state["exp_avg"], expected[p] + 0)
    assert {*stock.state_dict()["state"][0]} == {"step", "exp_avg", "exp_avg_sq"}
    before = parameters_of(model)
    train(model, fp8compile.decompress(stock), batches(1))
    assert not torch.equal(before[0], next(model.parameters()))


def test_a_learning_rate_of_zero_leaves_our_parameters_where_they_are() -> None:
    """torch.optim's own compiled step divides 0 by 0 there, where no gradient has been; warm-up often begins at 0."""
    p = nn.Parameter(torch.randn(64, 128))
    p.grad = torch.zeros_like(p)
    p.grad[0] = 1
    before = p.detach().clone()
    optim.AdamW([p], lr=0.0, compiled=False).step()
    assert torch.equal(p, before)
