"""fp8compile.calibrate: what it measures, whom it calls unsafe, its file, and models that train with it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile import calibrate
from fp8compile.islands.search import computes
from fp8compile.recipe.calibration import CalibratedValue, Calibration, Measurements
from fp8compile.tools.calibrate import _merged
from tests.support.calibration import Scaled, amax, error_of, run_options, values
from tests.support.graphs import joint_of
from tests.support.measure import compiled, llama_case
from tests.support.reference import sqnr_db
from tests.support.vit import ViT


class LinearAttention(nn.Module):
    """Katharopoulos et al., with values over the length, which overflows FP16 or vanishes in it."""

    def __init__(self, dim: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k, v = F.elu(q) + 1, F.elu(k) + 1, v / length
        state = torch.einsum("bhnd,bhne->bhde", k, v)
        inverse = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(2)) + 1e-6)
        mixed = torch.einsum("bhnd,bhde,bhn->bhne", q, state, inverse) * length
        return self.out(mixed.transpose(1, 2).flatten(2))


# ---------------------------------------------------------------------------------------------------- what is measured


def test_every_value_is_measured_in_fp32_forward_and_backward() -> None:
    model = Scaled(lambda y: (y * y).sum(-1) * 2.0**-16)
    batches = [torch.tensor([[1.0, -300.0, 2.0, 0.0]]).half(), torch.full((1, 4), 100.0).half()]
    found = calibrate(model, batches)
    assert amax(found, "mul") == [300.0, 9e4, 1.37] and amax(found, "sum") == [9e4]
    unsafe = {v.op: found.overflow_reason(v) for v in values(found) if v.amax == 9e4}
    assert unsafe == dict.fromkeys(("mul.Tensor", "sum.dim_IntList"), "amax 9e+04 measured: above FP16's 65504")
    # d loss / d y = 2**-16 y + 2**-16 y, and d loss / d w = x times that; of equal values each is measured
    assert amax(found, "mul", "backward") == [1.53e-05, 0.00458, 0.00458, 2.75]
    assert amax(found, "add", "backward") == [0.00916] and all(v.dtype == "f16" for v in values(found))


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"x": x}])
def test_a_batch_is_a_tensor_arguments_or_keywords(form: Callable[[Tensor], object]) -> None:
    assert amax(calibrate(Scaled(), [form(torch.full((4,), 3.0).half())]), "mul") == [3.0]


def test_a_loss_scale_is_chosen_and_only_what_no_single_scale_fits_is_unsafe() -> None:
    model, x = Scaled(lambda y: y * 2), torch.ones(4).half()
    small = calibrate(model, [x], loss=lambda y: y.sum() * 2.0**-13)
    assert small.loss_scale == 2.0**12 and not any(map(small.overflow_reason, values(small)))
    assert amax(small, "mul", "backward") == [float(f"{2.0**-12:.3g}")] * 2
    apart = calibrate(Scaled(lambda y: y * 2.0**-14 * 2.0**14), [x])
    unsafe = {v.amax for v in values(apart) if v.direction == "backward" and apart.overflow_reason(v)}
    assert apart.loss_scale == 1.0 and unsafe == {16400.0}, "the median is 1, one of them is 2**14"


def test_where_a_value_begins_to_be_unsafe() -> None:
    def why(amount: float, dtype: str = "f16", direction: str = "forward", scale: float = 1.0) -> str | None:
        return Calibration((), loss_scale=scale).overflow_reason(
            CalibratedValue("a", "exp", "", "", direction, dtype, amount)
        )

    assert why(65504 / 8) is None and why(2.0**-14 * 8) is None and why(0) is None
    assert why(8190) == "amax 8.2e+03 measured: less than 8 times below FP16's 65504"
    assert why(1e-4) == "amax 0.0001 measured: less than 8 times above 2**-14, where FP16 loses bits"
    assert why(1e-6) == "amax 1e-06 measured: below 2**-14, where FP16 loses bits"
    assert why(1e30, "bf16") is None and why(1e-30, "bf16") is None
    assert why(1e-6, direction="backward", scale=2.0**20) is None
    assert "amax 1.6e+04 measured at loss scale 16384: less" in str(why(1.0, direction="backward", scale=2.0**14))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 2))
    model[1].requires_grad_(False).eval()
    model = nn.Sequential(model, nn.BatchNorm1d(2)).half()
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    batches = [torch.randn(5, 3, 8, 8).half() for _ in range(2)]
    state = torch.get_rng_state()
    first, again = (calibrate(model, batches) for _ in range(2))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert [m.training for m in model.modules()] == modes and not all(modes)
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert first.text == again.text and first == again, "with dropout, byte for byte"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_of_a_healthy_layer_all_is_seen_and_nothing_is_unsafe(dtype: torch.dtype) -> None:
    layer, args = llama_case(seq=32, hidden=64, ffn=96, heads=2, dtype=dtype)
    found = calibrate(layer, [args])
    assert len(values(found)) > 60 and all(
        v.amax > 0 or v.op == "full.default" for graph in found.graphs for v in graph.values
    )
    assert not any(map(found.overflow_reason, values(found)))
    fn = compiled(
        layer, fp32=found, **{"linears.emulate": True, "saved.min_numel": 0}
    )  # with FP8 linears, storage and observation
    fn(*args).float().sum().backward()
    assert not fp8compile.report(fn).islands and all(p.grad.isfinite().all() for p in layer.parameters())


def test_masks_are_no_overflow_but_what_goes_through_their_value_is() -> None:
    def attention(fill: float) -> Callable[[Tensor], Tensor]:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return lambda y: torch.softmax(torch.where(mask, 0.0, fill).half() + y, -1).float().sum(-1)

    x = torch.randn(4, 4).half()
    for fill in (-torch.inf, torch.finfo(torch.float16).min):
        found = calibrate(Scaled(attention(fill)), [x], loss=lambda y: y[0] * 2)
        assert not any(map(found.overflow_reason, values(found))) and len(amax(found, "add")) == 1
    ramp = calibrate(
        Scaled(lambda y: y * 256 * 2.0**-10), [torch.linspace(-256, 0, 512).half()[:, None].expand(512, 4)]
    )
    assert ramp.overflow_reason(values(ramp)[1]) == "amax 6.5e+04 measured: less than 8 times below FP16's 65504"


def test_under_autocast_and_with_a_graph_break() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            torch._dynamo.graph_break()
            return self.b(h) * 2.0**-20

    model, x = Two(), torch.randn(4, 4)
    with torch.no_grad():
        model.b.weight.mul_(2.0**20), model.b.bias.zero_()
    with torch.autocast("cpu", torch.float16):
        found = calibrate(model, [x], loss=lambda y: y.float().sum())
        assert [g.kind for g in found.graphs] == ["training", "training", "inference", "inference"]
        unsafe = {
            v.module for g in found.graphs for v in g.values if found.overflow_reason(v) and v.direction == "forward"
        }
        assert unsafe == {"b"}
        compiled(model, **run_options(found))(x).float().sum().backward()


# ----------------------------------------------------------------------------------------------- models that need it


@pytest.fixture(scope="module")
def unstable() -> tuple[ViT, Tensor, Calibration]:
    torch.manual_seed(0)
    model, images = ViT(depth=3).half(), torch.randn(4, 3, 16, 16).half()
    model.blocks[1].make_unstable()
    return model, images, calibrate(model, [images], loss=cross_entropy)


def cross_entropy(out: Tensor) -> Tensor:
    return F.cross_entropy(out.float(), torch.arange(len(out)) % 10)


def test_the_unstable_block_and_the_stream_behind_it_are_unsafe(unstable: tuple[ViT, Tensor, Calibration]) -> None:
    _, _, found = unstable
    order = [v.module for v in values(found)]
    begin = order.index("blocks.1.up")
    unsafe = [v for v in values(found) if found.overflow_reason(v) and v.direction == "forward"]
    assert unsafe[0] is values(found)[begin], "nothing before it"
    assert {"blocks.1.up", "blocks.1.down"} <= {v.module for v in unsafe}
    # behind it: the sums of the stream, and what the norms that read it hand to their backward; no product, no softmax
    behind = [v for v in unsafe if not v.module.startswith("blocks.1")]
    assert {v.module for v in behind} == {"blocks.2", "blocks.2.norm1", "blocks.2.norm2", "norm"}
    assert {v.op for v in behind if "norm" not in v.module} == {"add.Tensor"}


def test_it_trains_where_without_islands_all_is_nan(unstable: tuple[ViT, Tensor, Calibration]) -> None:
    model, images, found = unstable
    exact = copy.deepcopy(model).double()
    reference = torch.autograd.grad(cross_entropy(exact(images.double())), list(exact.parameters()))
    losses: dict[str, list[float]] = {}
    for name, islands in (("calibrated", found), ("off", "off")):
        ours = copy.deepcopy(model)
        fn, losses[name], first = compiled(ours, **run_options(islands)), [], None
        for _ in range(3):
            loss = cross_entropy(fn(images))
            gradients = torch.autograd.grad(loss * found.loss_scale, list(ours.parameters()))
            first = first or gradients
            with torch.no_grad():
                for p, g in zip(ours.parameters(), gradients, strict=True):
                    p.sub_((g.float() * (0.05 / found.loss_scale)).half())
            losses[name].append(loss.item())
        if name == "calibrated":  # to 40 dB wherever the gradient of a parameter, which is FP16, can hold it
            holds = [float(r.abs().max()) * found.loss_scale >= 2.0**-14 * found.headroom for r in reference]
            noise = [sqnr_db(r, g / found.loss_scale) for r, g in zip(reference, first, strict=True)]
            assert sum(holds) >= 25 and min(n for n, h in zip(noise, holds, strict=True) if h) >= 40, noise
        torch._dynamo.reset()
    assert losses["calibrated"][2] < losses["calibrated"][0] < 5, losses
    assert not torch.tensor(losses["off"]).isfinite().any()


def test_linear_attention_of_4096_tokens_needs_a_quarter_of_its_nodes() -> None:
    model, x = LinearAttention().half(), torch.randn(1, 4096, 128).half()
    exact = copy.deepcopy(model).double()(x.double()).detach()
    assert model(x).abs().max() == 0, "eager FP16: an infinite denominator"
    found = calibrate(model, [x])
    nodes = [n for n in joint_of(model, x, **run_options("off")).nodes if computes(n)]
    torch._dynamo.reset()
    fn = compiled(model, **run_options(found))
    y = fn(x).detach()
    (island,) = fp8compile.report(fn).islands
    assert y.isfinite().all() and sqnr_db(exact, y) >= 40
    assert 4 * island.nodes <= len(nodes) and "amax 2e+05 measured: above FP16's 65504" in island.reason


# --------------------------------------------------------------------------------------------------- graphs and shapes


class Small(nn.Module):
    """A product, a softmax over a size that may be symbolic, a mean over one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return (torch.softmax(h @ h.t(), -1) @ h).mean(0).square().sum()


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_calibrated_at_batch_2_and_used_at_batch_3(dynamic: bool | None) -> None:
    model = Small().half()
    two, three = (torch.randn(n, 16).half() * n**3 for n in (2, 3))
    found = calibrate(model, [two])
    if dynamic is not None:  # else Dynamo, which has seen batch 2, takes it to be symbolic
        torch._dynamo.reset()
    options = run_options(found, **{"debug.codegen": "eager", "fp32.observe": True})
    fn = torch.compile(model, backend="fp8compile", dynamic=dynamic, options=options)
    for batch in (three, two):
        fn(batch).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    if dynamic is None:
        both = calibrate(model, [two, three])
        assert [g.keys for g in both.graphs] == [g.keys for g in found.graphs], "one entry, whatever the shape"
        largest = copy.deepcopy(model.up).float()(three.float()).abs().max().item()
        assert amax(both, "addmm") == [pytest.approx(largest, rel=0.005)] and amax(found, "addmm")[0] < largest / 2


def test_graphs_that_are_known_by_the_same_are_one_with_the_larger_amax() -> None:
    def graph(kind: str, *amounts: float) -> Measurements:
        return Measurements(
            kind, tuple(CalibratedValue(f"a_{a}", "exp", "", "", "forward", "f16", a) for a in amounts)
        )

    found = _merged([graph("training", 1, 5), graph("inference", 9, 9), graph("training", 3, 2), graph("training")])
    assert [(g.kind, [v.amax for v in g.values]) for g in found] == [("training", [3, 5]), ("inference", [9, 9])]


def test_evaluation_finds_its_own_measurements() -> None:
    model, x = (
        Scaled(lambda y: y * 256 * 2.0**-10),
        torch.full((4,), 300.0).half(),
    )  # no policy calls a factor of 256 unsafe
    found = calibrate(model, [x])
    assert [g.kind for g in found.graphs] == ["training", "inference"]
    fn = compiled(model.eval(), **run_options(found))
    with torch.no_grad():
        assert fn(x).tolist() == [75.0] * 4


def test_an_inference_graph_that_was_not_measured_is_none_and_a_training_graph_is_an_error() -> None:
    x = torch.ones(4).half()
    found = calibrate(Scaled(torch.sin), [x])
    other = compiled(Scaled(lambda y: torch.cos(y).sum()), **run_options(found))
    with torch.no_grad():
        assert torch.equal(other(x), torch.cos(x).sum())
    told = error_of(lambda: other(x))
    assert (
        "16-bit value 2 was sin = sin.default of the model (forward, f16)" in told and "is cos = cos.default" in told
    )
    nothing = dataclasses.replace(found, graphs=found.graphs[1:])
    assert "holds no training graph" in error_of(lambda: compiled(Scaled(torch.sin), **run_options(nothing))(x))


# ------------------------------------------------------------------------------------------------------------ bad input


X = torch.ones(4).half()


@pytest.mark.parametrize(
    ("batches", "more", "message"),
    [
        ([], {}, "no batches. Give one at least"),
        (X, {}, "batches is a Tensor; give a list of batches, if only of one: [batch]"),
        ({"x": X}, {}, "batches is a dict; give a list"),
        ([X], {"headroom": 1}, "headroom=1 must be a number above 1"),
        ([X], {"headroom": "much"}, "headroom='much' must be a number"),
        ([X], {"headroom": 1e6}, "headroom=1000000.0 must be a number above 1 and below 32760: how often"),
        ([X, (X / 0,)], {}, "batch 1, argument 0 holds inf in 4 of 4"),
        ([{"x": X * torch.nan}], {}, "batch 0, x holds nan in 4 of 4"),
        ([X], {"loss": lambda y: y.sum() * torch.nan}, "batch 0, the loss is nan"),
        (
            [X],
            {"loss": lambda y: (y * 0).float().sum().sqrt()},
            "batch 0, the gradient of w holds nan with the model in FP32",
        ),
        ([X], {"loss": lambda y: y}, "loss must return a scalar"),
        ([X], {"recipe": "of"}, "no preset 'of'"),
    ],
)
def test_bad_input(batches: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        calibrate(Scaled(), batches, **more)
    assert message in str(caught.value)


def test_a_parameter_that_is_nan_and_a_model_without_16_bit_or_without_graphs() -> None:
    model = nn.Sequential(Scaled())
    with torch.no_grad():
        model[0].w[1] = torch.nan
    with pytest.raises(ValueError, match=r"calibrate: 0.w holds nan in 1 of 4"):
        calibrate(model, [X])
    with pytest.raises(ValueError, match=r"nothing to calibrate: no graph of this model computes in 16 bit"):
        calibrate(Scaled(dtype=torch.float32), [X.float()])
    with pytest.raises(ValueError, match=r"fp8compile.calibrate: torch.compile was asked .* and compiled no graph"):
        calibrate(Skipped(), [X])


class Skipped(Scaled):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return x * self.w
