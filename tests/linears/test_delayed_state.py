"""The state of delayed scales: saved and loaded to the bit, small, and refused by name where it does not fit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile.linears import history
from fp8compile.linears.state import NONE_YET
from fp8compile.numerics.delayed import PATIENCE
from tests.linears.plain import Plain
from tests.linears.training import DELAYED, LENGTH, data, own, steps_of
from tests.support.measure import compiled


def test_a_saved_state_goes_on_to_the_bit() -> None:
    torch.manual_seed(3)
    model = Plain()
    steps_of(model, 5)
    state, weights = fp8compile.tools.scaling_state(model).state_dict(), copy.deepcopy(model.state_dict())
    on = steps_of(model, 3)
    torch._dynamo.reset()
    for before in (True, False):  # loaded before the first call, and after it
        other = Plain()
        if before:
            fp8compile.tools.scaling_state(other).load_state_dict(state)
        else:
            compiled(other, **DELAYED)(data(0)).mean().backward()
            other.zero_grad(set_to_none=True)
            fp8compile.tools.scaling_state(other).load_state_dict(state)
        other.load_state_dict(weights)
        assert all(map(torch.equal, on, steps_of(other, 3)))


def test_a_state_saved_behind_a_jump_goes_on_measuring() -> None:
    model, other = Plain(), Plain()
    run = compiled(model, **DELAYED)
    for x in (data(0), 1000 * data(0)):
        run(x).square().mean().backward()
    assert own(model).must_measure()
    fp8compile.tools.scaling_state(other).load_state_dict(fp8compile.tools.scaling_state(model).state_dict())
    compiled(other, **DELAYED)(data(0))
    assert own(other).must_measure() and own(other).entries == 2


def test_a_state_from_before_zeros_were_left_out_is_loaded() -> None:
    """It has no patience, and zeros in front of its amaxes."""
    model, other = Plain(), Plain()
    steps_of(model, 3)
    state = fp8compile.tools.scaling_state(model).state_dict()
    (graph,) = state["graphs"]
    del graph["patience"]
    graph["amaxes"] = F.pad(graph["amaxes"], (1, -1))
    fp8compile.tools.scaling_state(other).load_state_dict(state)
    other.load_state_dict(model.state_dict())
    compiled(other, **DELAYED, **{"linears.margin": 0})(data(0))
    each = own(other)
    assert each.entries == 3 and each.patience.tolist() == [0, PATIENCE] and not each.must_measure()
    largest = torch.tensor([history.MAX[o.format] for o in each.operands])
    assert torch.equal(each.inv_scales, graph["amaxes"].amax(1) / largest)


def test_the_state_holds_no_gigabytes_and_lies_on_the_cpu() -> None:
    model = Plain()
    steps_of(model, 1)
    (graph,) = fp8compile.tools.scaling_state(model).state_dict()["graphs"]
    assert graph["amaxes"].shape == (6, LENGTH) and graph["amaxes"].device.type == "cpu"
    assert sorted(graph["operands"]) == sorted(f"{n}.{r}" for n in "ab" for r in ("input", "weight", "gradient"))


def test_before_any_step_there_is_nothing_to_say() -> None:
    assert str(fp8compile.tools.scaling_state(Plain())) == NONE_YET
    with pytest.raises(ValueError, match="scaling_state takes the model"):
        fp8compile.tools.scaling_state("model")  # type: ignore[arg-type]


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b2(self.a(x))
        return y


def test_the_state_of_another_model_is_refused_by_name() -> None:
    model, other = Plain(), Other()
    steps_of(model, 1)
    state = fp8compile.tools.scaling_state(model).state_dict()
    with pytest.raises(ValueError, match=r"no module 'b'.*b2"):
        fp8compile.tools.scaling_state(other).load_state_dict(state)
    with pytest.raises(ValueError, match="format 1"):
        fp8compile.tools.scaling_state(model).load_state_dict({"format": 7})


def test_the_state_of_another_recipe_is_refused() -> None:
    one, other = Plain(), Plain()
    steps_of(one, 1)
    state = fp8compile.tools.scaling_state(one).state_dict()
    for changes, said in (
        ({"linears.amax_history_len": 8}, "set it to 4"),
        ({"linears.skip": "b"}, "no graph of this model has the operands"),
    ):
        torch._dynamo.reset()
        compiled(other, **DELAYED | changes)(data(0)).mean().backward()
        with pytest.raises(ValueError, match=said):
            fp8compile.tools.scaling_state(other).load_state_dict(state)
        history._alive.clear()
