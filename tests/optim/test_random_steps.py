"""Optimizers that nobody has thought of: random shapes, layouts, formats, masters and options, node by node.

Pieces, shared kernels and sizes that are left open have the numbers of each parameter by itself, bit for bit. So has a step
behind a state dict that was saved and loaded.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile import _torch as private
from fp8compile import optim
from fp8compile.numerics.states.channels_last import laid_by_channels
from fp8compile.numerics.states.registry import SIGNED_ONLY, STATE_FORMATS, UNSIGNED_ONLY
from fp8compile.optim import compiled_step
from fp8compile.optim.plan import UpdatePlan
from fp8compile.optim.row_views import as_one_piece

SIZES = (1, 2, 3, 5, 7, 8, 16, 24, 64, 100, 127, 128, 129, 130, 200, 256, 320, 384, 640)
MOST, STEPS, BATCH = 60_000, 3, 8
DIMENSIONS = (0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 5)
OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("AdamW", {"maximize": True}),
    ("Adam", {"weight_decay": 0.1}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Lion", {}),
    ("RMSprop", {"centered": True}),
    ("RMSprop", {"momentum": 0.5}),
    ("LAMB", {}),
)
MASTERS = {
    torch.float32: ("none",),
    torch.float16: ("none", "split", "fp32"),
    torch.bfloat16: ("none", "split", "fp32", "fp16_scaled"),
}


@dataclass
class Setup:
    """A random optimizer, its parameters, and gradients for each step, by ``seed``."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.kind, self.options = rng.choice(OPTIONS)
        self.dtype = rng.choice([*MASTERS])
        first = rng.choice([each for each in STATE_FORMATS if each not in UNSIGNED_ONLY])
        second = rng.choice([each for each in STATE_FORMATS if each not in SIGNED_ONLY])
        self.rest = {
            "lr": rng.choice([0.0, 1e-3, 1e-2]),
            "master": rng.choice(MASTERS[self.dtype]),
            "state_format": (first, second),
            "overrides": {"*": (first, second)} if rng.random() < 0.7 else {},
        }
        self.shapes = [self._shape() for _ in range(rng.randint(1, 4))]
        self.layouts = [rng.choice(["as is", "as is", "channels_last", "transposed"]) for _ in self.shapes]
        self.absent = rng.random() < 0.2  # a gradient at each step

    def _shape(self) -> list[int]:
        shape = [self.rng.choice(SIZES) for _ in range(self.rng.choice(DIMENSIONS))]
        while torch.Size(shape).numel() > MOST:
            longest = shape.index(max(shape))
            shape[longest] = max(1, shape[longest] // 2)
        return shape

    def parameters(self) -> list[nn.Parameter]:
        torch.manual_seed(self.seed)
        made = [torch.randn(shape).to(self.dtype) for shape in self.shapes]
        return [nn.Parameter(laid(t, layout)) for t, layout in zip(made, self.layouts, strict=True)]

    def build(self, parameters: list[nn.Parameter]) -> optim.EncodedOptimizer:
        named = [(f"w{i}", p) for i, p in enumerate(parameters)]
        return getattr(optim, self.kind)(named, **self.rest, **self.options)  # type: ignore[no-any-return]

    def give_gradients(self, parameters: list[nn.Parameter], step: int) -> None:
        """In layouts of their own, of magnitudes of their own."""
        rng = random.Random(self.seed * STEPS + step)
        torch.manual_seed(self.seed * STEPS + step)
        for i, p in enumerate(parameters):
            g = torch.randn(p.shape).to(p.dtype) * 10.0 ** ((i + step) % 3 - 1)
            layout = rng.choice(["parameter's", "as is", "channels_last", "expanded"])
            p.grad = torch.empty_like(p).copy_(g) if layout == "parameter's" else laid(g, layout)
            if self.absent and i == step and len(parameters) > 1:
                p.grad = None


def laid(t: Tensor, layout: str) -> Tensor:
    if layout == "channels_last" and t.dim() in (4, 5):
        return laid_by_channels(t)
    if layout == "transposed" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    return t.flatten()[:1].expand(t.numel()).view(t.shape) if layout == "expanded" else t


def _alone(several: Any) -> list[Any]:
    return [[(as_one_piece(plan, p), compiled_step._whole)] for plan, p in several]


def _as_it_is(plan: UpdatePlan, tensors: dict[str, Tensor]) -> tuple[UpdatePlan, dict[str, Tensor], bool]:
    return plan, tensors, False


def stepped(setup: Setup, *, alone: bool = False, resumed: bool = False) -> list[dict[str, Tensor]]:
    """Parameters and states behind all steps; ``resumed``: from a file before the last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_step, "COMPILED", {})
        if alone:
            patch.setattr(compiled_step, "pieces_of_all", _alone)
            patch.setattr(compiled_step, "laid_out", _as_it_is)
        parameters = setup.parameters()
        optimizer = setup.build(parameters)
        for step in range(STEPS):
            if resumed and step == STEPS - 1:
                file = io.BytesIO()
                torch.save(optimizer.state_dict(), file)
                parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
                optimizer = setup.build(parameters)
                optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
            setup.give_gradients(parameters, step)
            optimizer.step()
    return [{"param": p.detach()} | dict(optimizer.state.get(p, {})) for p in parameters]


@pytest.fixture
def node_by_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code runs its graph, and nothing is generated."""
    monkeypatch.setattr(private, "compile_fx_inner", lambda graph, *_, **__: lambda taken: graph(*taken))
    yield


def bits(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def check(seed: int) -> None:
    setup = Setup(seed)
    found = stepped(setup)
    for other in (stepped(setup, alone=True), stepped(setup, resumed=True)):
        for i, (ours, theirs) in enumerate(zip(found, other, strict=True)):
            assert ours.keys() == theirs.keys()
            wrong = [name for name in ours if not torch.equal(bits(ours[name]), bits(theirs[name]))]
            assert not wrong, (setup, setup.kind, setup.rest, setup.shapes[i], setup.layouts[i], wrong)


@pytest.mark.parametrize("seed", range(2))
def test_a_few(seed: int, node_by_node: None) -> None:
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(BATCH, 160, BATCH))
def test_many(seed: int, node_by_node: None) -> None:
    for each in range(seed, seed + BATCH):
        check(each)
