"""tune: what cannot be measured is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8compile.tools import tune
from fp8compile.tools.tuning import compiled_arm
from tests.support.sensitive import Net, batch, squares


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x) * mask


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch": None}, "batch=None: one batch is needed"),
        ({"batch": iter([1])}, r"batch=a list_iterator.*next\(iter\(loader\)\)"),
        ({"batch": ()}, "give a batch"),
        (
            {"batch": {"z": torch.ones(2)}},
            r"Net does not run.*unexpected keyword argument 'z'.*z: float32\[2\] on cpu",
        ),
        ({"batch": torch.ones(8, 3)}, r"Net does not run.*RuntimeError.*argument 0: float32\[8, 3\] on cpu"),
        ({"model": Broken()}, "Broken does not run.*missing 1 required positional argument: 'mask'"),
        ({"model": squares}, "fp8compile.tune takes a module"),
        ({"model": Net().requires_grad_(False)}, "tune: nothing to differentiate.*requires_grad_"),
        ({"model": Net().to("meta")}, "meta device"),
        ({"loss": lambda out: out}, r"must return a scalar, not a tensor of shape \(256, 64\)"),
        ({"loss": lambda out: out.sum().item()}, r"must return a scalar tensor, not -?[\d.]+: leave out .item"),
        ({"loss": lambda out: out.logits.sum()}, "loss does not run on what the model returns, Tensor.*'logits'"),
        ({"minutes": 0}, "minutes=0: a number above 0"),
        ({"minutes": -1.5}, "minutes=-1.5"),
        ({"minutes": float("nan")}, "minutes=nan"),
        ({"minutes": True}, "minutes=True"),
        ({"minutes": "2"}, "minutes='2'"),
        ({"goal": "fast"}, "tune: goal='fast'.*'speed', 'memory'"),
        ({"slower": -0.1}, "tune: slower=-0.1"),
        ({"bar": 101}, "tune: bar=101 is no SQNR"),
        ({"recipes": ["memry"]}, "recipes: 'memry'.*Did you mean 'memory'"),
        ({"recipes": [{"saved_fromat": "int8"}]}, "Did you mean 'saved.format'"),
        ({"recipes": "memory"}, "recipes='memory': a list of recipes"),
        ({"recipes": []}, r"recipes=\[\]"),
        ({"recipes": {"saved": "int8"}}, r"'saved' is a field of one recipe: recipes=\[\{"),
        ({"recipes": [3]}, "A recipe is a Recipe"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_compiled(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_arm.CompiledArm, "_compile", lambda *args: pytest.fail("compiled"))
    given = {"model": Net(), "batch": batch(), "loss": squares, **given}
    with pytest.raises(ValueError, match=message):
        tune(given.pop("model"), given.pop("batch"), **given)


def test_a_model_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8compile.tools.tuning.tune.is_sharded", lambda p: True)
    with pytest.raises(ValueError, match=r"Net is of several ranks.*give all ranks the recipe"):
        tune(Net(), batch())
