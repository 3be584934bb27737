"""Acceptance of the range analysis: in random graphs, every value that is seen lies in its range.

Each graph is run on 1,000 inputs, FP16's extremes among them, in FP32 and FP64. A range speaks of what is made from finite
numbers: a sample counts for a node as long as everything before it is finite. Then an infinity is outside of a range whose
bound the dtype could hold, and a NaN (0/0, or inf - inf within a sum) outside of one whose two bounds it could hold.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule, Node

from fp8compile._torch import make_fx, select_decomp_table
from fp8compile.analysis.ranges import Interval, ranges

SIDE, SAMPLES = 4, 1000
LARGEST = 65504.0
DATA = Interval(-LARGEST, LARGEST)

Step = Callable[[Tensor, Tensor, int, float], Tensor]  # of two values, a dimension and a positive number

STEPS: dict[str, Step] = {
    "add": lambda x, y, d, c: x + y,
    "add_scaled": lambda x, y, d, c: torch.add(x, y, alpha=c),
    "sub": lambda x, y, d, c: x - y,
    "mul": lambda x, y, d, c: x * y,
    "square": lambda x, y, d, c: x * x,
    "scale": lambda x, y, d, c: c * x,
    "shift": lambda x, y, d, c: x + c,
    "div": lambda x, y, d, c: x / y,
    "div_safely": lambda x, y, d, c: x / (y.abs() + c),
    "div_number": lambda x, y, d, c: x / c,
    "neg": lambda x, y, d, c: -x,
    "abs": lambda x, y, d, c: x.abs(),
    "maximum": lambda x, y, d, c: torch.maximum(x, y),
    "minimum": lambda x, y, d, c: torch.minimum(x, y),
    "clamp": lambda x, y, d, c: x.clamp(-c, 2 * c),
    "relu": lambda x, y, d, c: x.relu(),
    "where": lambda x, y, d, c: torch.where(x > c, x, y),
    "elu": lambda x, y, d, c: F.elu(x) + 1,
    "softplus": lambda x, y, d, c: F.softplus(x),
    "silu": lambda x, y, d, c: F.silu(x),
    "gelu": lambda x, y, d, c: F.gelu(x),
    "exp": lambda x, y, d, c: x.exp(),
    "exp2": lambda x, y, d, c: x.exp2(),
    "expm1": lambda x, y, d, c: x.expm1(),
    "exp_shifted": lambda x, y, d, c: (c * (x - x.amax(d, keepdim=True))).exp(),
    "exp_crossed": lambda x, y, d, c: (x - x.amax(d)).exp(),
    "softmax": lambda x, y, d, c: x.softmax(d),
    "log_softmax": lambda x, y, d, c: x.log_softmax(d),
    "logsumexp": lambda x, y, d, c: (x - x.logsumexp(d, keepdim=True)).exp(),
    "log": lambda x, y, d, c: (x.abs() + c).log(),
    "log1p": lambda x, y, d, c: x.abs().log1p(),
    "sqrt": lambda x, y, d, c: x.abs().sqrt(),
    "rsqrt": lambda x, y, d, c: (x.abs() + c).rsqrt(),
    "reciprocal": lambda x, y, d, c: (x * x + c).reciprocal(),
    "cube": lambda x, y, d, c: x**3,
    "inverse_square": lambda x, y, d, c: (x.abs() + c) ** -2,
    "root": lambda x, y, d, c: x.abs() ** 0.75,
    "sigmoid": lambda x, y, d, c: x.sigmoid(),
    "tanh": lambda x, y, d, c: x.tanh(),
    "erf": lambda x, y, d, c: x.erf(),
    "sin": lambda x, y, d, c: x.sin(),
    "cos": lambda x, y, d, c: x.cos(),
    "floor": lambda x, y, d, c: x.floor(),
    "ceil": lambda x, y, d, c: x.ceil(),
    "round": lambda x, y, d, c: x.round(),
    "sign": lambda x, y, d, c: x.sign(),
    "sum": lambda x, y, d, c: x.sum(d, keepdim=True),
    "sum_all": lambda x, y, d, c: x.sum(),
    "mean": lambda x, y, d, c: x.mean(d, keepdim=True),
    "average": lambda x, y, d, c: x.sum(d, keepdim=True) / x.shape[d],
    "amax": lambda x, y, d, c: x.amax(d, keepdim=True),
    "amin": lambda x, y, d, c: x.amin(d, keepdim=True),
    "var": lambda x, y, d, c: x.var(d, correction=d, keepdim=True),
    "centred": lambda x, y, d, c: x - x.mean(d, keepdim=True),
    "cumsum": lambda x, y, d, c: x.cumsum(d),
    "layer_norm": lambda x, y, d, c: F.layer_norm(x, (SIDE,)),
    "rms_norm": lambda x, y, d, c: x * (x.pow(2).mean(d, keepdim=True) + c).rsqrt(),
    "l2_norm": lambda x, y, d, c: x / (x.pow(2).sum(d, keepdim=True).sqrt() + c),
    "l1_norm": lambda x, y, d, c: x / x.abs().sum(d, keepdim=True).clamp_min(c),
    "largest_norm": lambda x, y, d, c: x / (x.abs().amax(d, keepdim=True) + c),
    "normalize": lambda x, y, d, c: F.normalize(x, dim=d),
    "crossed_norm": lambda x, y, d, c: x / (x.pow(2).sum(d) + c).sqrt(),
    "mm": lambda x, y, d, c: x @ y,
    "mm_transposed": lambda x, y, d, c: x @ y.t(),
    "addmm": lambda x, y, d, c: torch.addmm(x, y, x, beta=c),
    "baddbmm": lambda x, y, d, c: torch.baddbmm(x[None], x[None], y[None], alpha=c)[0],
    "attention": lambda x, y, d, c: x.softmax(-1) @ y,
    "attention_crossed": lambda x, y, d, c: x.softmax(0) @ y,
    "transpose": lambda x, y, d, c: x.t(),
    "cat": lambda x, y, d, c: torch.cat([x[:2], y[2:]]),
    "stack": lambda x, y, d, c: torch.stack([x[0], y[1], x[2], y[3]], d),
    "pad": lambda x, y, d, c: F.pad(x[1:, 1:], (1, 0, 0, 1), value=c),
}

PHASES = (Phase.explicit, Phase.generate)  # shrinking takes minutes, and the message names the node

steps = st.tuples(
    st.sampled_from(sorted(STEPS)),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 1),
    st.sampled_from([1e-6, 0.01, 0.5, 1.0, 3.0, 500.0]),
)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=PHASES)
@given(st.lists(steps, min_size=3, max_size=10), st.sampled_from([torch.float32, torch.float64]))
def test_what_is_seen_is_within_what_is_proven(
    program: list[tuple[str, int, int, int, float]], dtype: torch.dtype
) -> None:
    def run(x: Tensor, y: Tensor) -> Tensor:
        values = [x, y]
        for name, i, j, d, c in program:  # operands are counted from the latest value
            a, b = (values[-1 - k % len(values)] for k in (i, j))
            values.append(STEPS[name](a, b, d, c).expand(SIDE, SIDE))
        return values[-1]

    example = torch.ones(SIDE, SIDE, dtype=dtype)
    gm = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")(example, example)
    proven = ranges(gm.graph, {node: DATA for node in gm.graph.find_nodes(op="placeholder")})
    seen = values_of(gm, *samples(dtype))
    checked = sum(check(node, proven[node], seen) for node in seen)
    assert checked >= 2 * SAMPLES, "the inputs themselves are finite"


def samples(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two inputs, 1,000 of each: normal numbers of every size, and FP16's extremes, alone and mixed."""
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, SIDE, SIDE)
    sizes = 2.0 ** torch.randint(-24, 15, (SAMPLES, 1, 1), generator=generator)
    extremes = torch.tensor([0.0, LARGEST, -LARGEST, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0, -1.0, 300.0, 12.0])
    found = []
    for _ in range(2):
        x = torch.randn(shape, generator=generator) * sizes
        picked = extremes[torch.randint(len(extremes), shape, generator=generator)]
        mixed = torch.rand(SAMPLES, 1, 1, generator=generator) < 0.3
        x = torch.where(mixed & (torch.rand(shape, generator=generator) < 0.5), picked, x)
        x[: len(extremes)] = extremes[:, None, None]  # all alike
        x[len(extremes) : 100] = picked[len(extremes) : 100]
        found.append(x.half().to(dtype).clamp(-LARGEST, LARGEST))
    return found[0], found[1].roll(7, 0)


def values_of(gm: GraphModule, *inputs: Tensor) -> dict[Node, Tensor]:
    """Every floating-point value of the graph, for all samples at once."""
    nodes = [n for n in gm.graph.nodes if isinstance(v := n.meta.get("val"), Tensor) and v.is_floating_point()]
    output = gm.graph.output_node()
    output.args = (tuple(nodes),)
    gm.recompile()
    values = torch.vmap(gm, randomness="error")(*inputs)
    return dict(zip(nodes, values, strict=True))


def check(node: Node, proven: Interval, seen: dict[Node, Tensor]) -> int:
    """How many samples were checked; all of them lie in the range."""
    before, waiting = set(), list(node.all_input_nodes)
    while waiting:
        parent = waiting.pop()
        if parent not in before:
            before.add(parent)
            waiting += parent.all_input_nodes
    finite = torch.ones(SAMPLES, dtype=torch.bool)
    for parent in before & seen.keys():
        finite &= seen[parent].reshape(SAMPLES, -1).isfinite().all(1)
    x = seen[node][finite].flatten()
    largest = torch.finfo(x.dtype).max
    lower, upper = float(proven.lower), float(proven.upper)
    inside = (x >= lower) & (x <= upper)
    inside |= (x == torch.inf) & (upper >= largest) | (x == -torch.inf) & (lower <= -largest)
    inside |= x.isnan() & (max(-lower, upper) >= largest)
    assert inside.all(), f"{node.format_node()} is {x[~inside][:4].tolist()}, proven: {proven}"
    return int(finite.sum())
