"""Bounds hold what is computed, and what is found to forget a state has a slope below one in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fp8compile import _torch as private
from fp8compile.optim.proofs import BELOW_ONE, EVERYTHING, INF, RULES, Bounds, bounds_of, class_of, forgets, packet_of

aten = torch.ops.aten
Function = Callable[..., Any]
DRAWS = 300
SOME = (-INF, -40.0, -3.0, -1.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 1.0, 3.0, 40.0, INF)
SLACK = 2.0**-50  # of FP64's own roundings

# By label: a function of so many tensors.
ONE: dict[str, Function] = {
    "reciprocal": aten.reciprocal.default,
    "neg": aten.neg.default,
    "sqrt": aten.sqrt.default,
    "abs": aten.abs.default,
    "sign": aten.sign.default,
    "exp": aten.exp.default,
    "clone": aten.clone.default,
    "ones": aten.ones_like.default,
    "zeros": aten.zeros_like.default,
    "in FP32": lambda x: aten._to_copy.default(x, dtype=torch.float32),
    "whether not zero": lambda x: aten._to_copy.default(x, dtype=torch.bool),
    "as integers": lambda x: aten._to_copy.default(x.clamp(-1e6, 1e6), dtype=torch.int64),
    "expand": lambda x: aten.expand.default(x, [2, 16]),
    "view": lambda x: aten.view.default(x, [4, 4]),
    "bits": lambda x: aten.view.dtype(x, torch.int64),
    "square": lambda x: aten.pow.Tensor_Scalar(x, 2),
    "cube": lambda x: aten.pow.Tensor_Scalar(x, 3),
    "root by a power": lambda x: aten.pow.Tensor_Scalar(x, 0.5),
    "power of a number": lambda x: aten.pow.Scalar(0.5, x),
    "clamp below": lambda x: aten.clamp.default(x, -0.5),
    "clamp above": lambda x: aten.clamp.default(x, None, 0.5),
    "clamp crossed": lambda x: aten.clamp.default(x, 2.0, 1.0),
    "times itself": lambda x: aten.mul.Tensor(x, x),
    "less two": lambda x: aten.add.Tensor(x, -2),
    "from one": lambda x: aten.rsub.Scalar(x, 1),
}
TWO: dict[str, Function] = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "rsub": aten.rsub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "pow": aten.pow.Tensor_Tensor,
    "maximum": aten.maximum.default,
    "minimum": aten.minimum.default,
    "add alpha": lambda x, y: aten.add.Tensor(x, y, alpha=-2),
    "sub alpha": lambda x, y: aten.sub.Tensor(x, y, alpha=3),
    "rsub alpha": lambda x, y: aten.rsub.Tensor(x, y, alpha=3),
    "div floor": lambda x, y: aten.div.Tensor_mode(x, y, rounding_mode="floor"),
    "lerp": lambda x, y: aten.lerp.Scalar(x, y, 0.25),
    "lerp past": lambda x, y: aten.lerp.Scalar(x, y, 1.5),
    "where": lambda x, y: aten.where.self(x > y, x, y),
}
THREE: dict[str, Function] = {
    "clamp": aten.clamp.Tensor,
    "lerp": aten.lerp.Tensor,
    "addcmul": aten.addcmul.default,
    "addcmul value": lambda x, y, z: aten.addcmul.default(x, y, z, value=-2),
    "where": lambda x, y, z: aten.where.self(x > 0, y, z),
}
CASES = {
    f"{label} of {count}": (function, count)
    for count, of in enumerate((ONE, TWO, THREE), 1)
    for label, function in of.items()
}
# May: what they do is not known.
SAY_NOTHING = ("whether not zero", "as integers", "bits", "div floor", "lerp past", "alpha", "value")


def traced(function: Function, count: int, shape: tuple[int, ...] = (16,)) -> Graph:
    """What the function does to FP64 tensors, with nothing written in place."""
    args = [torch.full(shape, 0.75, dtype=torch.float64) for _ in range(count)]
    graph: Graph = private.make_fx(torch.func.functionalize(function), decomposition_table={})(*args).graph
    return graph


def result_of(graph: Graph) -> Node:
    found: Any = graph.output_node().args[0]
    assert isinstance(found, Node)
    return behind_detach(found)


def behind_detach(node: Node) -> Node:
    """What tracing has detached."""
    return node.args[0] if packet_of(node) is aten.detach else node  # type: ignore[return-value]


def some_bounds(rng: random.Random) -> Bounds:
    low, high = sorted(rng.choice(SOME) if rng.random() < 0.7 else rng.gauss(0, 2) for _ in range(2))
    return low, high


def some_within(bounds: Bounds, rng: random.Random) -> float:
    """A number in there. A zero is what it is the limit of: 1 / 0 is as large as the bounds have it."""
    between = rng.uniform(max(bounds[0], -50.0), min(bounds[1], 50.0))
    found = rng.choice([*bounds, *(each for each in (between, *SOME) if bounds[0] <= each <= bounds[1])])
    return math.copysign(0.0, bounds[0] + bounds[1]) if found == 0 else found


def holds(bounds: Bounds, values: Tensor) -> bool:
    """Roundings apart, of its dtype."""
    slack = 4 * torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
    low, high = (end * (1 + slack * math.copysign(1, end * way)) for end, way in zip(bounds, (-1, 1), strict=True))
    return bool(((values >= low) & (values <= high) | values.isnan()).all())


def drawn(graph: Graph, rng: random.Random) -> tuple[dict[Node, Bounds], list[Tensor]]:
    """Bounds of its inputs, and values that are within them."""
    known = {each: some_bounds(rng) for each in graph.find_nodes(op="placeholder")}
    values = [[some_within(each, rng) for _ in range(16)] for each in known.values()]
    return known, [torch.tensor(each, dtype=torch.float64) for each in values]


@pytest.mark.parametrize("label", CASES)
def test_a_rule_holds_what_its_operation_computes(label: str) -> None:
    graph, rng, said = traced(*CASES[label]), random.Random(0), 0
    module = GraphModule({}, graph)
    for _ in range(DRAWS):
        known, values = drawn(graph, rng)
        found = bounds_of(graph, known)[result_of(graph)]
        assert holds(found, module(*values)), (known, found)
        said += found != EVERYTHING
    assert said >= DRAWS / 20 or any(word in label for word in SAY_NOTHING)


def test_each_rule_is_tried() -> None:
    tried = {packet_of(node) for case in CASES.values() for node in traced(*case).nodes}
    assert set(RULES) <= tried


def test_bounds_that_are_no_number_are_everything() -> None:
    graph = traced(lambda x, y: x - y, 2)
    x, y = graph.find_nodes(op="placeholder")
    assert bounds_of(graph, {x: (INF, INF), y: (INF, INF)})[result_of(graph)] == EVERYTHING
    assert bounds_of(graph, {x: (0.0, 1.0)})[result_of(graph)] == EVERYTHING, "of y nothing is known"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, (0.0, 0.0)),
        (-0.0, (0.0, 0.0)),
        (5e-324, (0.0, BELOW_ONE)),
        (0.999999, (0.0, BELOW_ONE)),
        (BELOW_ONE, (0.0, BELOW_ONE)),
        (math.nextafter(BELOW_ONE, 2), (0.0, 1.0)),
        (1.0, (0.0, 1.0)),
        (math.nextafter(1.0, 2), (0.0, INF)),
        (INF, (0.0, INF)),
        (-5e-324, EVERYTHING),
        (-INF, EVERYTHING),
    ],
)
def test_class_of_a_number(number: float, expected: Bounds) -> None:
    assert class_of(number) == expected


FORGETS: dict[str, Function] = {
    "decays": lambda s, g: s.clone().mul_(0.9).add_(g),
    "lerp": lambda s, g: torch.lerp(s, g, 0.1),
    "lerp to it": lambda s, g: torch.lerp(g, s, 0.9),
    "product and sum": lambda s, g: torch.addcmul(g, 0.5 * s, torch.ones_like(g)) + 0 * s,
    "maximum of what decays": lambda s, g: torch.maximum(0.9 * s, g.abs()),
    "where it decays": lambda s, g: torch.where(g > 0, 0.9 * s, g),
    "clamped and decays": lambda s, g: (0.5 * s + g).clamp(-1, 1),
    "half, negated": lambda s, g: g - 0.5 * s,
    "divided": lambda s, g: (s + g) / 2,
    "in parts": lambda s, g: 0.5 * s + 0.4 * s.neg().neg(),
    "not at all": lambda s, g: g * g,
}
KEEPS: dict[str, Function] = {
    "itself": lambda s, g: s,
    "sum": lambda s, g: s + g * g,
    "difference": lambda s, g: g - s,
    "from one": lambda s, g: 1 - s,
    "maximum": lambda s, g: torch.maximum(s, g),
    "minimum": lambda s, g: torch.minimum(g, s),
    "where": lambda s, g: torch.where(g > 0, s, g),
    "clamped": lambda s, g: (s + g).clamp(-1, 1),
    "grows": lambda s, g: s * 1.2,
    "divided by half": lambda s, g: s / 0.5,
    "lerp of nothing": lambda s, g: torch.lerp(s, g, 0.0),
    "lerp past it": lambda s, g: torch.lerp(s, g, -0.5),
    "times what may be anything": lambda s, g: s * g,
    "in parts": lambda s, g: 0.5 * s + 0.6 * s,
    "in parts, of both signs": lambda s, g: 0.6 * s - (0.5 * s).abs() + g,
    "in another order of elements": lambda s, g: (s.flip(0) + g.flip(0)).flip(0),
    "in another shape": lambda s, g: (s.reshape(4, 4).t() + 1).t().reshape(16),
    "by an operation that is not known": lambda s, g: torch.nan_to_num(s + g),
    "in other units": lambda s, g: torch.logaddexp(s, g),
    "as half precision": lambda s, g: aten.add.Tensor(g, 0.5 * s, alpha=3),
}


def is_forgotten(function: Function) -> bool:
    graph = traced(function, 2)
    state = graph.find_nodes(op="placeholder")[0]
    return forgets(state, result_of(graph), bounds_of(graph, {}))


@pytest.mark.parametrize("name", FORGETS)
def test_forgets(name: str) -> None:
    assert is_forgotten(FORGETS[name])
    assert slope(FORGETS[name]) <= BELOW_ONE


@pytest.mark.parametrize("name", KEEPS)
def test_keeps(name: str) -> None:
    assert not is_forgotten(KEEPS[name])


def slope(function: Function) -> float:
    """The largest |d s' / d s| at random points, by autograd in FP64."""
    generator = torch.Generator().manual_seed(0)
    s, g = (torch.randn(16, dtype=torch.float64, generator=generator) for _ in range(2))
    made = function(s.requires_grad_(), g)
    if not made.requires_grad:
        return 0.0
    [found] = torch.autograd.grad(made.sum(), s, allow_unused=True)
    return float(found.abs().amax()) if found is not None else 0.0


def program(rng: random.Random, depth: int) -> Function:
    """A random function of a state and a gradient."""
    if depth == 0:
        return rng.choice((lambda s, g: s, lambda s, g: s, lambda s, g: g))
    x, y = program(rng, depth - 1), program(rng, rng.randrange(depth))
    by = rng.uniform(-1.0, 1.0)
    made: list[Function] = [
        lambda s, g: x(s, g) * by + y(s, g) * (1 - abs(by)),
        lambda s, g: x(s, g) * by,
        lambda s, g: x(s, g) - by * y(s, g),
        lambda s, g: torch.lerp(x(s, g), y(s, g), abs(by)),
        lambda s, g: torch.maximum(x(s, g), y(s, g)),
        lambda s, g: torch.where(g > 0, x(s, g), by * y(s, g)),
        lambda s, g: x(s, g).clamp(-0.5, 2.0),
        lambda s, g: x(s, g).abs(),
        lambda s, g: x(s, g) / (1 + abs(by)),
        lambda s, g: torch.addcmul(y(s, g), x(s, g), by * torch.ones_like(s)),
    ]
    return rng.choice(made)


def test_what_is_found_to_forget_a_state_has_a_slope_below_one() -> None:
    """Of random programs, a fifth of which forgets at least."""
    rng, found = random.Random(1), 0
    for _ in range(DRAWS):
        function = program(rng, 4)
        if is_forgotten(function):
            found += 1
            assert slope(function) <= BELOW_ONE + SLACK
    assert found >= DRAWS / 5


def test_bounds_hold_the_values_of_random_programs() -> None:
    rng = random.Random(2)
    for _ in range(DRAWS):
        graph = traced(program(rng, 4), 2)
        known, values = drawn(graph, rng)
        assert holds(bounds_of(graph, known)[result_of(graph)], GraphModule({}, graph)(*values))
