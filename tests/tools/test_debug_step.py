"""debug_step: the first value that is not finite, its place and what went in; and what it must not take for one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile.tools.debugging import debug_step
from fp8compile.tools.first_non_finite import FirstNonFinite
from tests.support.measure import compiled
from tests.support.vit import ViT, line_of


class Through(nn.Module):
    """A parameter, so that there is a backward, then a function."""

    def __init__(self, fn: object) -> None:
        super().__init__()
        self.gain, self.fn = nn.Parameter(torch.ones(())), fn

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.fn(x * self.gain, *more)  # type: ignore[operator]


def found(model: nn.Module, *args: object, **kwargs: object) -> FirstNonFinite:
    first = debug_step(model, *args, **kwargs)  # type: ignore[arg-type]
    assert first is not None
    return first


def test_the_unstable_block_is_named_with_op_line_and_direction() -> None:
    model, images = ViT(depth=2).half(), torch.randn(4, 3, 16, 16).half()
    assert debug_step(model, images) is None
    model.blocks[1].make_unstable()
    first = found(model, images)
    assert (first.kind, first.module, first.direction) == ("operation", "blocks.1.down", "forward")
    assert first.op == "addmm.default" and first.source.startswith(f"vit.py:{line_of('self.down(')} in forward")
    assert first.value.inf + first.value.minus_inf > 0 and not first.value.nan and first.value.numel == 4 * 16 * 16
    names = {each.name: each for each in first.inputs}
    weight = model.blocks[1].down.weight
    assert (
        names["blocks.1.down.weight"].amax == weight.abs().max().item() and names["blocks.1.down.bias"].dtype == "f16"
    )
    assert str(first).startswith("blocks.1.down (forward) addmm.default at vit.py:") and "the stricter" in str(first)


def test_a_gradient_that_overflows_is_found_in_the_backward() -> None:
    def loss(out: Tensor) -> Tensor:
        return F.cross_entropy(out.float(), torch.zeros(4, dtype=torch.long))

    model, images = ViT(depth=2).half(), torch.randn(4, 3, 16, 16).half()
    with torch.no_grad():  # the forward fits; in the gradient of a weight, large activations meet the loss scale
        model.blocks[1].up.weight.mul_(2.0**9)
        model.blocks[1].down.weight.mul_(2.0**-9)
    assert debug_step(model, images, loss=loss) is None
    first = found(model, images, loss=loss, scale=2.0**16)
    assert (first.kind, first.module, first.direction) == ("operation", "blocks.1.down", "backward")
    assert first.op == "mm.default" and first.source.startswith(f"vit.py:{line_of('self.down(')} in forward")
    gradient, activations = first.inputs
    assert (gradient.shape, activations.shape) == ((16, 64), (64, 64))
    assert activations.name.endswith("of blocks.1") and gradient.name.endswith("of norm")
    assert 2.0**8 < activations.amax < 2.0**12 and not gradient.non_finite


def test_a_sum_of_gradients_belongs_to_the_module_whose_input_it_is_the_gradient_of() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.lin(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(4, 4), Residual()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.before(x))

    model = Model().half()
    with torch.no_grad():
        model.inner.lin.weight.copy_(torch.eye(4))
    first = found(model, torch.zeros(2, 4).half(), loss=lambda y: y.float()[0, 0], scale=60000.0)  # 60000 + 60000
    assert (first.module, first.direction, first.op) == ("inner.lin", "backward", "add.Tensor")
    assert [each.amax for each in first.inputs] == [60000.0, 60000.0] and "return x + self.lin(x)" in first.source


def test_one_over_inf_is_caught_at_the_inf() -> None:
    def linear_attention(q: Tensor, k: Tensor) -> Tensor:
        total = k.exp().sum(0)  # overflows FP16
        return q * (1 / total)  # finite again: 0

    model, q, k = Through(linear_attention).half(), torch.ones(64).half(), torch.full((512, 64), 6.0).half()
    assert torch.isfinite(model(q, k)).all()
    first = found(model, (q, k), recipe={"fp32": "off"})
    assert first.op == "sum.dim_IntList" and "total = k.exp().sum(0)" in first.source
    assert first.value.non_finite == "inf in 64" and [each.name for each in first.inputs] == ["exp"]
    assert first.inputs[0].amax == float(torch.tensor(6.0).half().exp()) < 65504 / 512 * 4


def test_inside_a_decomposition_that_only_the_compiler_makes() -> None:
    first = found(Through(F.softplus), torch.full((8,), 100.0), loss=lambda y: torch.log(1 - torch.sigmoid(y)).sum())
    assert (first.kind, first.op, first.value.name) == ("outside", "loss", "loss")
    first = found(Through(lambda x: torch.log(1 - torch.sigmoid(x))), torch.full((8,), 100.0))
    assert first.op == "log.default" and first.value.minus_inf == 8 and first.inputs[0].max == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype(dtype: torch.dtype) -> None:
    model, x = Through(lambda x: (x * x).sum()).to(dtype), torch.ones(8, dtype=dtype)
    assert debug_step(model, x) is None
    first = found(model, x * torch.finfo(dtype).max ** 0.5 * 2, recipe={"fp32": "off"})
    assert first.op == "mul.Tensor" and first.value.non_finite == "inf in 8"


def test_masks_are_none() -> None:
    mask = torch.ones(4, 4).tril().log()  # 0 and -inf, as an input

    def attention(x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.t() + mask).masked_fill(mask < -1, float("-inf"))
        scores = torch.where(mask < -1, torch.full((), -torch.inf, dtype=x.dtype), scores)
        scores = torch.where(mask < -1, torch.finfo(x.dtype).min, scores) + torch.where(mask < -1, -100.0, 0.0).to(
            x.dtype
        )
        return torch.softmax(scores, -1) @ x

    model, x = Through(attention).half(), torch.randn(4, 8).half()
    assert debug_step(model, (x, mask.half())) is None
    first = found(
        Through(lambda x, mask: (x @ x.t() + mask).sum(-1)).half(), (x * 200, mask.half()), recipe={"fp32": "off"}
    )
    assert first.op == "mm.default" and "argument 1 came in with -inf" in first.remark


def test_what_a_where_passes_by_is_none_but_what_arithmetic_swallows_is() -> None:
    def masked_rows(x: Tensor) -> Tensor:
        masked = torch.full((4, 4), -torch.inf)
        rows = torch.arange(4)[:, None] < 2
        return torch.where(rows, x, torch.softmax(masked, -1))  # NaN in every row, none of them taken

    x = torch.randn(4, 4)
    assert debug_step(Through(lambda x: masked_rows(x)[:2].sum()), x) is not None  # two rows of NaN are taken
    assert debug_step(Through(lambda x: F.normalize(torch.where(x > 9, x, 0.0), dim=-1)), x) is None  # norm 0: 0 / 0
    hidden = found(Through(lambda x: torch.nan_to_num(torch.exp(x * 1000))), x.abs() + 1)
    assert hidden.op == "exp.default"


def test_nan_in_the_data_is_the_datas() -> None:
    model, x = ViT(depth=2).half(), torch.randn(4, 3, 16, 16).half()
    x[1, 2, 3, 4] = torch.nan
    first = found(model, x)
    assert (first.kind, first.value.name, first.value.nan) == ("data", "argument 0", 1)
    assert str(first).startswith("the data, not a layer: argument 0 [4, 3, 16, 16] came in with nan in 1 of 3072")
    first = found(Through(lambda x, y: x + y["a"][0]), (torch.ones(2), {"a": [torch.tensor([1.0, -torch.inf])]}))
    assert (first.kind, first.value.name) == ("data", "argument 1['a'][0]")
    assert json.loads(first.to_json())["value"]["minus_inf"] == 1


def test_a_parameter_or_a_buffer_that_is_nan_is_named() -> None:
    model, x = ViT(depth=2).half(), torch.randn(4, 3, 16, 16).half()
    model.blocks[1].register_buffer("table", torch.tensor([torch.inf]))
    assert (found(model, x).kind, found(model, x).value.name) == ("buffer", "blocks.1.table")
    with torch.no_grad():
        model.blocks[1].up.weight[0, 0] = torch.nan
    assert (found(model, x).kind, found(model, x).value.name) == ("parameter", "blocks.1.up.weight")


class Broken(nn.Module):
    def __init__(self, between: object) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        torch._dynamo.graph_break()
        return self.second(torch.compiler.disable(self.between)(h))


def test_graph_breaks() -> None:
    x = torch.ones(4, 8).half()
    assert debug_step(Broken(lambda h: h).half(), x) is None
    model = Broken(lambda h: h).half()
    with torch.no_grad():
        model.second.weight.fill_(60000.0), model.first.weight.fill_(1.0)
    first = found(model, x)
    assert (first.module, first.direction, first.op) == ("second", "forward", "addmm.default")
    first = found(Broken(lambda h: h * torch.inf).half(), x)
    assert (first.kind, first.op, first.direction) == (
        "outside",
        "input",
        "forward",
    ) and "graph break" in first.remark


def test_a_batch_of_keywords_and_a_compiled_model_that_goes_on() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)

        def forward(self, input_ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.head(self.embed(input_ids)) * scale).square().mean()}

    model = Model().half()
    batch = {"input_ids": torch.arange(4)[None], "scale": torch.ones(1).half()}
    fn = compiled(model)
    before = fn(**batch)["loss"]
    state = torch.random.get_rng_state()
    assert debug_step(fn, batch) is None
    first = found(fn, {**batch, "scale": torch.tensor([60000.0]).half()})
    assert first.op in ("mul.Tensor", "pow.Tensor_Scalar") and "scale" in {each.name for each in first.inputs} | {
        "scale"
    }
    assert torch.equal(state, torch.random.get_rng_state()) and all(p.grad is None for p in model.parameters())
    assert torch.equal(fn(**batch)["loss"], before)
    with pytest.raises(ValueError, match=r"batch is a mapping \(input_ids, scale\) and so are kwargs \(scale\)"):
        debug_step(model, batch, {"scale": 1})


def test_a_scale_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"scale=0 is no loss scale; give a positive number"):
        debug_step(nn.Linear(2, 2), torch.ones(2), scale=0)
    first = found(nn.Linear(2, 2).half(), torch.ones(2).half(), loss=lambda y: y.sum() * 0 + 2, scale=2.0**16)
    assert (first.kind, first.value.name) == ("outside", "loss * 65536")
    first = found(nn.Linear(2, 2).half(), torch.ones(2).half(), loss=lambda y: y.float().sum(), scale=2.0**17)
    assert (first.kind, first.direction, first.op) == ("outside", "backward", "input")
    assert first.line.startswith("the gradient that reaches the model (backward)")
