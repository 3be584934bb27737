"""A channels_last parameter's states lie as its memory: numbers, code and launches of a contiguous one of that order."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8compile
from fp8compile import optim
from fp8compile.numerics.states.channels_last import MARK, in_memory_order, is_channels_last
from fp8compile.optim import compiled_step
from fp8compile.optim.row_views import viewed
from fp8compile.optim.small_parameters import pieces_of_all

SHAPES = [(64, 32, 3, 3), (64, 160, 3, 3), (48, 3, 7, 7), (32, 16, 3, 3, 3)]
MASTERS = [(torch.float32, "none"), *((torch.bfloat16, each) for each in ("none", "split", "fp32", "fp16_scaled"))]
BESIDE = ("correction", "master", "master_fp16")
OPTIONS: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9}, "Lion": {}}
FORMATS = ["e4m3_expanded", "fp32", "4bit", ("int8_companded", "rank1_linear4")]


def parameters(dtype: torch.dtype, *, by_channels: bool, shapes: Any = SHAPES) -> list[nn.Parameter]:
    """Of ``shapes`` and channels_last; or the same numbers in the same memory, of contiguous tensors."""
    torch.manual_seed(0)
    made = [in_memory_order(torch.randn(shape)).contiguous().to(dtype) for shape in shapes]
    return [nn.Parameter(t.movedim(-1, 1) if by_channels else t) for t in made]


def step(optimizer: optim.EncodedOptimizer, several: list[nn.Parameter], seed: int, *, plain: bool = False) -> None:
    """With gradients in the order of parameters' memory, or ``plain``: contiguous."""
    torch.manual_seed(seed)
    for p in several:
        moved = is_channels_last(p)
        g = torch.randn_like(in_memory_order(p).contiguous() if moved else p)
        p.grad = g.movedim(-1, 1) if moved else g
        p.grad = p.grad.contiguous() if plain else p.grad
    optimizer.step()


def flat(t: Tensor) -> Tensor:
    """Its bytes in the order of its memory."""
    return (in_memory_order(t) if is_channels_last(t) else t).detach().contiguous().view(-1).view(torch.uint8)


def stepped(kind: str, dtype: torch.dtype, *, by_channels: bool, plain: bool = False, **options: Any) -> list[Tensor]:
    """The bytes of parameters and states after three steps."""
    several = parameters(dtype, by_channels=by_channels)
    optimizer = getattr(optim, kind)(several, lr=1e-2, **OPTIONS[kind], **options)
    for seed in range(3):
        step(optimizer, several, seed, plain=plain)
    return [flat(t) for p in several for t in (p, *optimizer.state[p].values())]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("dtype", "master"), MASTERS, ids=str)
def test_numbers_are_those_of_its_memory(kind: str, dtype: torch.dtype, master: str) -> None:
    options = {"compiled": False, "master": master}
    expected = stepped(kind, dtype, by_channels=False, **options)
    for plain in (False, True):
        found = stepped(kind, dtype, by_channels=True, plain=plain, **options)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("state_format", FORMATS, ids=str)
def test_formats_are_those_of_its_memory(state_format: Any) -> None:
    """Packed ones, and one whose amaxes are of rows and columns, which are others."""
    expected = stepped("AdamW", torch.float32, by_channels=False, compiled=False, state_format=state_format)
    found = stepped("AdamW", torch.float32, by_channels=True, compiled=False, state_format=state_format)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("plain", [False, True], ids=["gradients alike", "contiguous gradients"])
def test_compiled_code_is_that_of_contiguous_ones(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_step, "COMPILED", {})
    expected = stepped("AdamW", torch.bfloat16, by_channels=False, master="split")
    known = {*compiled_step.COMPILED}
    found = stepped("AdamW", torch.bfloat16, by_channels=True, master="split", plain=plain)
    assert all(map(torch.equal, found, expected))
    assert {*compiled_step.COMPILED} == known


def test_a_shape_more_is_no_kind_more() -> None:
    """On a GPU, as fakes say: convolutions of whole groups share code with matrices, others with small parameters."""
    signatures = {}
    for name, shapes in {
        "one": [(64, 128, 3, 3), (64, 32, 3, 3)],
        "more": [(256, 512, 3, 3), (128, 384, 5, 5), (48, 3, 7, 7)],
    }.items():
        several = parameters(torch.bfloat16, by_channels=True, shapes=shapes)
        optimizer = optim.AdamW(several, compiled=False)
        step(optimizer, several, 0)
        made = [compiled_step.laid_out(*optimizer.step_function(p)) for p in several]
        found = zip(made, pieces_of_all((plan, tensors["param"]) for plan, tensors, _ in made), strict=True)
        signatures[name] = {
            compiled_step.signed(piece, viewed(tensors, view))[0]
            for (_, tensors, _), pieces in found
            for piece, view in pieces
        }
    assert len(signatures["one"]) == 2 and signatures["one"] == signatures["more"]


def test_keys_say_so_and_all_parts_are_contiguous() -> None:
    """A convolution of one by one is contiguous too, as one of a channel is: its states are as any others."""
    shapes = [(64, 96, 3, 3), (64, 128, 1, 1), (512, 1, 3, 3)]
    several = parameters(torch.bfloat16, by_channels=True, shapes=shapes)
    optimizer = optim.AdamW(several, master="split", compiled=False)
    step(optimizer, several, 0)
    conv, *others = (optimizer.state[p] for p in several)
    assert {name: [*t.shape] for name, t in conv.items() if name.startswith("exp_avg.")} == {
        "exp_avg.e4m3_expanded@channels_last.codes": [64, 3, 3, 96],
        "exp_avg.e4m3_expanded@channels_last.amax": [64, 3, 3],
        "exp_avg.e4m3_expanded@channels_last.k": [64, 3, 3],
    }
    assert all(t.is_contiguous() for name, t in conv.items() if name != "correction")
    assert is_channels_last(conv["correction"])
    assert not any(MARK in name for state in others for name in state)
    assert "e4m3_expanded@channels_last" in str(optimizer.report())


def test_whole_tensors_are_left_as_they_are() -> None:
    """LAMB looks at a parameter's norms, Muon at its matrix: no order of elements is theirs to choose."""
    several = parameters(torch.float32, by_channels=True)
    optimizer = optim.LAMB(several, compiled=False)
    step(optimizer, several, 0)
    assert not any(MARK in name for p in several for name in optimizer.state[p])


@pytest.mark.parametrize(("dtype", "master"), MASTERS, ids=str)
def test_a_resume_changes_no_bit(dtype: torch.dtype, master: str) -> None:
    several = parameters(dtype, by_channels=True)
    optimizer = optim.AdamW(several, lr=1e-2, master=master, compiled=False)
    step(optimizer, several, 0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other = copy.deepcopy(several)
    resumed = optim.AdamW(other, lr=1e-2, master=master, compiled=False)
    resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    for each in ((optimizer, several), (resumed, other)):
        step(*each, 1)
    for p, q in zip(several, other, strict=True):
        assert torch.equal(p, q) and optimizer.state[p].keys() == resumed.state[q].keys()
        assert all(map(torch.equal, map(flat, optimizer.state[p].values()), map(flat, resumed.state[q].values())))


@pytest.mark.parametrize("flipped", [False, True], ids=["to channels_last", "from channels_last"])
@pytest.mark.parametrize("master", ["none", "split"])
def test_states_of_the_other_layout_are_encoded_again(flipped: bool, master: str) -> None:
    """From a file, or as a model changes its layout in training; they decode to what they were, within a code's step."""
    [p] = parameters(torch.bfloat16, by_channels=flipped, shapes=[(64, 96, 3, 3)])
    p = nn.Parameter(p.detach().reshape(64, 96, 3, 3) if not flipped else p.detach())
    optimizer = optim.AdamW([p], lr=1e-2, master=master, compiled=False)
    step(optimizer, [p], 0)
    before = optimizer.export_fp32_state_dict()["state"][0]
    low = {name: t.clone() for name, t in optimizer.state[p].items() if name in BESIDE}

    q = nn.Parameter(other_layout(p.detach()))
    loaded = optim.AdamW([q], lr=1e-2, master=master, compiled=False)
    loaded.load_state_dict(optimizer.state_dict())
    p.data = other_layout(p.data)
    p.grad = None
    step(optimizer, [p], 1)
    step(loaded, [q], 1)
    for here, param in ((optimizer, p), (loaded, q)):
        assert all((MARK in name) != flipped for name in here.state[param] if "." in name)
    assert torch.equal(p, q)

    fresh = optim.AdamW([nn.Parameter(q.detach())], lr=1e-2, master=master, compiled=False)
    fresh.load_state_dict(optim_state(before, low))
    after = fresh.export_fp32_state_dict()["state"][0]
    for name, most in {
        "exp_avg": 2.0**-4,
        "exp_avg_sq": 2.0**-3,
    }.items():  # half a step of E4M3; dithered, a whole one
        assert after[name].stride() == q.stride()
        assert 0 < (after[name] - before[name]).norm() / before[name].norm() < most


@pytest.mark.parametrize("flipped", [False, True], ids=["to channels_last", "from channels_last"])
def test_low_bits_alone_follow_a_change_of_layout(flipped: bool) -> None:
    """No key of a state tells: plain SGD has none."""
    [p] = parameters(torch.bfloat16, by_channels=True, shapes=[(64, 96, 3, 3)])
    p.data = p.data if flipped else other_layout(p.data)
    optimizer = optim.SGD([p], lr=1e-4, master="split", compiled=False)
    step(optimizer, [p], 0)
    before = optimizer.state[p]["correction"].clone()
    p.data, p.grad = other_layout(p.data), None
    optimizer._start(p, optimizer.param_groups[0])
    after = optimizer.state[p]["correction"]
    assert after.stride() == p.stride() != before.stride() and before.any()
    assert torch.equal(after, before)


def other_layout(t: Tensor) -> Tensor:
    return t.contiguous() if is_channels_last(t) else t.to(memory_format=torch.channels_last)


def optim_state(state: dict[str, Tensor], low: dict[str, Tensor]) -> dict[str, Any]:
    plain = torch.optim.AdamW([torch.zeros(1)]).state_dict()
    return plain | {"state": {0: state | low}}


def test_the_way_back_to_torch_keeps_the_layout() -> None:
    several = parameters(torch.float32, by_channels=True)
    optimizer = optim.AdamW(several, lr=1e-2, compiled=False)
    step(optimizer, several, 0)
    theirs = torch.optim.AdamW(several, lr=1e-2)
    theirs.load_state_dict(optimizer.export_fp32_state_dict())
    for p in several:
        assert theirs.state[p]["exp_avg"].shape == p.shape
        assert theirs.state[p]["exp_avg"].stride() == p.stride()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 64, 3)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))  # type: ignore[no-any-return]


def trained(*, whole: bool) -> tuple[nn.Module, optim.EncodedOptimizer]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optim.AdamW(net, lr=1e-2, compiled=False)
    recipe = {"linears": "off", "saved": "off", "debug.codegen": "eager"}

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    step = fp8compile.train_step(net, loss_of, optimizer, recipe=recipe, fallback=False)
    loss = torch.compile(lambda *batch: loss_of(net, *batch), backend="fp8compile", options=recipe)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(4, 16, 8, 8).to(memory_format=torch.channels_last), torch.randint(0, 10, (4,))
        if whole:
            step(x, y)
            continue
        loss(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def test_a_whole_step_equals_the_three_calls() -> None:
    if torch.__version__ < "2.12":
        pytest.skip("graphs take addcmul and addcdiv apart there: two roundings, where the operators have one")
    (one, ours), (other, theirs) = trained(whole=True), trained(whole=False)
    assert any(MARK in name for state in ours.state.values() for name in state)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(map(torch.equal, map(flat, ours.state[p].values()), map(flat, theirs.state[q].values())))
