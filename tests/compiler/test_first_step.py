"""debug.check="first_step": warns by name, once; the training it looks at goes on as if it had not looked."""

from __future__ import annotations

import copy
import gc
import logging
import weakref

import pytest
import torch
from torch import Tensor, nn

from fp8compile import Recipe
from fp8compile.compiler import first_step
from fp8compile.compiler.first_step import copied
from tests.support.measure import compiled
from tests.support.sensitive import SENSITIVE, Net, batch, squares


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "fp8compile" and r.levelno == logging.WARNING]


def train(model: nn.Module, steps: int = 3, **options: object) -> list[Tensor]:
    """Losses, then the state of the random numbers."""
    torch.manual_seed(5)
    run, optimizer = compiled(model, **options), torch.optim.SGD(model.parameters(), 1e-4)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(squares(run(batch())))
        losses[-1].backward()
        optimizer.step()
    return [*(loss.detach() for loss in losses), torch.get_rng_state()]


def test_it_warns_by_name_and_once(caplog: pytest.LogCaptureFixture) -> None:
    train(Net(SENSITIVE), **{"debug.check": "first_step"})
    (said,) = warnings(caplog)
    assert said.startswith(
        "debug.check='first_step': 1 of 8 gradients of this graph are below 10 dB of the exact ones: after."
    )
    assert (
        "after.weight" in said
        and "fp8compile.check(model, batch)" in said
        and "before" not in said
        and "bias" not in said
    )


def test_a_model_where_all_is_well_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8compile")
    train(Net(dropout=0.3), **{"debug.check": "first_step"})
    assert warnings(caplog) == []
    told = [r.getMessage() for r in caplog.records if "all 8 gradients of a graph are well" in r.getMessage()]
    assert len(told) == 1 and "inf dB" not in told[0], "something was encoded, and is not compared with itself"


def test_one_that_compares_the_step_with_itself_is_found_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_step, "exact", lambda recipe: recipe)
    with pytest.raises(ValueError, match="not enough values"):
        test_it_warns_by_name_and_once(caplog)


def test_losses_gradients_buffers_and_random_numbers_are_those_without_it() -> None:
    looked_at, alone = (Net(SENSITIVE, dropout=0.3) for _ in range(2))
    alone.load_state_dict(looked_at.state_dict())
    for one, other in zip(train(looked_at, **{"debug.check": "first_step"}), train(alone), strict=True):
        assert torch.equal(one, other)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, looked_at.state_dict()[name]), name


class Broken(nn.Module):
    """Two graphs; the second one's weight is the sensitive one, and its input trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.net = nn.Linear(64, 64), Net(SENSITIVE)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.net(y)


def test_graphs_are_judged_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fp8compile")
    train(Broken(), **{"debug.check": "first_step"})
    (said,) = warnings(caplog)
    assert "1 of 9 gradients" in said and "after.weight" in said
    assert [r.getMessage() for r in caplog.records if "all 2 gradients of a graph" in r.getMessage()]


def test_a_step_without_a_backward_leaves_the_check_to_the_next(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(SENSITIVE)
    run = compiled(model, **{"debug.check": "first_step"})
    del (first := [run(batch())])[0]
    gc.collect()
    with torch.no_grad():
        run(batch())
    assert warnings(caplog) == []
    one, other = run(batch()), run(batch())  # two forwards before the first backward
    squares(one).backward()
    squares(other).backward()
    assert len(warnings(caplog)) == 1 and not first


def test_twin_and_copies_are_gone_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[object]] = []
    original = first_step._Twin.__init__

    def remembered(self: object, *args: object) -> None:
        made.append(weakref.ref(self))
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(first_step._Twin, "__init__", remembered)
    model = Net()
    run = compiled(model, **{"debug.check": "first_step"})
    squares(run(batch())).backward()
    gc.collect()
    assert [ref() for ref in made] == [None]


class InPlace(nn.Module):
    """Changes what it is given, and a buffer that its result depends on."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.seen.add_(x.detach().mean(0))
        return torch.tanh(self.lin(x)) * (1 + self.seen)


def test_what_the_forward_overwrites_is_copied_before(caplog: pytest.LogCaptureFixture) -> None:
    model = InPlace()
    eager = copy.deepcopy(model)
    run, x, same = compiled(model, preset="off", **{"debug.check": "first_step"}), batch(), batch()
    squares(run(x)).backward()
    squares(eager(same)).backward()
    assert warnings(caplog) == [] and torch.equal(x, same) and torch.allclose(model.seen, eager.seen)


def test_copies_keep_strides_and_shared_memory() -> None:
    whole = torch.arange(24.0)
    wide, part, row = whole.view(4, 6), whole.view(4, 6)[1:, ::2], torch.ones(3).expand(5, 3)
    parameter = nn.Parameter(torch.randn(4, 4).t())
    again = copied([wide, part, row, parameter, 7, wide])
    assert again[4] == 7 and again[0] is again[5]
    for old, new in zip((wide, part, row, parameter), again[:4], strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride() and old.requires_grad == new.requires_grad
        assert new.is_leaf and old.data_ptr() != new.data_ptr()
    again[0].zero_()
    assert not again[1].any() and part.any()


def test_it_is_one_for_the_whole_recipe_and_changes_no_code() -> None:
    assert (
        Recipe(debug={"check": "first_step"}) == Recipe()
        and Recipe(debug={"check": "first_step"}).key == Recipe().key
    )
    with pytest.raises(ValueError, match=r"Recipe\.debug\.check cannot be 'always'"):
        Recipe(debug={"check": "always"})
    with pytest.raises(ValueError, match=r"sets debug\.check, which cannot differ by module"):
        Recipe(modules={"a": {"debug.check": "first_step"}})
