"""FP8 linears under inputs of every kind: what is not finite, nothing, one row, odd layouts, shared and frozen weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8compile
from fp8compile import Recipe
from fp8compile.reporting.entries import Linear, Skip
from tests.support.emulation import emulated, linear, results, trained
from tests.support.measure import compiled, matmul_entries, why

SIZE = 32
ALL_THREE = Counter(forward=1, dgrad=1, wgrad=1)


class Function(nn.Module):
    """A function of x and a weight, as a model."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.fn, self.weight = fn, nn.Parameter(torch.randn(*shape or (SIZE, SIZE)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x, self.weight)


def run(model: nn.Module, *args: Tensor, **options: Any) -> tuple[list[Tensor], list[Linear | Skip]]:
    """Output and gradients with FP8 linears, and what the report says of them."""
    fn = compiled(model, **{"linears": "tensorwise", "saved": "off", "linears.emulate": True, **options})
    found = results(fn, trained(model, *args), *args)
    return found, matmul_entries(fp8compile.report(fn))  # type: ignore[arg-type]


def plain(model: nn.Module, *args: Tensor) -> list[Tensor]:
    return results(model, trained(model, *args), *args)


def by_emulation(model: nn.Module, *args: Tensor) -> list[Tensor]:
    return emulated(model, trained(model, *args), *args)


def directions(linears: Sequence[Linear | Skip], path: str = "") -> Counter[str]:
    """How often each product of the linear at ``path`` was made FP8."""
    return Counter(x.direction for x in linears if x.origin.module == path and not why(x))


def reasons(linears: Sequence[Linear | Skip]) -> dict[str, int]:
    return dict(Counter(why(x) for x in linears if why(x)))


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape or (8, SIZE), requires_grad=True)


# ------------------------------------------------------------------------------------------- values at the edge


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_what_is_not_finite_reaches_all_that_it_reaches_without_us(where: str, value: float) -> None:
    model, x, factor = nn.Linear(SIZE, SIZE), rows(), torch.ones(8, SIZE)
    with torch.no_grad():
        {"input": x, "weight": model.weight, "gradient": factor}[where][3, 5] = value

    def products(fn: Callable[..., Tensor]) -> list[Tensor]:
        out = fn(x)
        return [out, *torch.autograd.grad((out * factor).sum(), trained(model, x))]

    ours = products(compiled(model, linears="tensorwise", saved="off", **{"linears.emulate": True}))
    theirs = products(model)
    assert not all(t.isfinite().all() for t in theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert not our[~their.isfinite()].isfinite().any()


@pytest.mark.parametrize("zero", ["input", "weight", "gradient"])
def test_zeros_stay_exact(zero: str) -> None:
    model, x = nn.Linear(SIZE, SIZE), rows()
    if zero != "gradient":
        with torch.no_grad():
            (x if zero == "input" else model.weight).zero_()
    fn = compiled(model, linears="tensorwise", saved="off", **{"linears.emulate": True})
    out = fn(x)
    factor = torch.zeros_like(out) if zero == "gradient" else torch.ones_like(out)
    weight, _, dx = torch.autograd.grad((out * factor).sum(), trained(model, x))
    assert weight.isfinite().all() and dx.isfinite().all()
    if zero != "gradient":
        assert torch.equal(out, model.bias.expand_as(out))
    assert zero == "weight" or torch.equal(weight, torch.zeros_like(weight))
    assert zero == "input" or torch.equal(dx, torch.zeros_like(dx))


# ------------------------------------------------------------------------------------------------------ shapes


def test_no_rows() -> None:
    model, x = nn.Linear(SIZE, SIZE), rows(0, SIZE)
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, plain(model, x), rtol=0, atol=0)
    assert reasons(linears) == {"no rows": len(linears)} and linears


@pytest.mark.parametrize("shape", [(1, SIZE), (1, 1, SIZE), (2, 3, SIZE), (2, 1, 5, SIZE)])
def test_any_number_of_rows_and_dimensions(shape: tuple[int, ...]) -> None:
    model, x = nn.Linear(SIZE, 48), rows(*shape)
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears) == ALL_THREE and not reasons(linears)


def test_one_dimension() -> None:
    model, x = nn.Linear(SIZE, SIZE), rows(SIZE)
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears) == ALL_THREE and {x.M for x in linears if isinstance(x, Linear)} == {1}


def test_a_vector_times_a_matrix_is_no_product_of_matrices() -> None:
    model, x = Function(lambda x, w: w @ x), rows(SIZE)
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, plain(model, x))
    assert not linears


LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "transposed": ((SIZE, 8), lambda x: x.t()),
    "expanded rows": ((1, SIZE), lambda x: x.expand(8, SIZE)),
    "expanded columns": ((8, 1), lambda x: x.expand(8, SIZE)),
    "expanded batch": ((1, 5, SIZE), lambda x: x.expand(3, 5, SIZE)),
    "every second row": ((16, SIZE), lambda x: x[::2]),
    "every second column": ((8, 2 * SIZE), lambda x: x[:, ::2]),
    "middle columns": ((8, 2 * SIZE), lambda x: x[:, 16:48]),
    "permuted": ((SIZE, 3, 5), lambda x: x.permute(2, 1, 0)),
    "heads put together": ((2, 2, 5, 16), lambda x: x.transpose(1, 2).reshape(2, 5, SIZE)),
    "diagonal": ((8, 8, SIZE), lambda x: x.diagonal(0, 0, 1).t()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    shape, view = LAYOUTS[layout]
    x, model = rows(*shape), Function(lambda x, w: F.linear(view(x), w))
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears) == ALL_THREE and not reasons(linears)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_data_that_takes_no_gradient(layout: str) -> None:
    shape, view = LAYOUTS[layout]
    x = rows(*shape).detach()
    model, given = nn.Linear(SIZE, SIZE), view(x)
    ours, linears = run(model, given)
    torch.testing.assert_close(ours, by_emulation(model, given))
    assert directions(linears) == Counter(forward=1, wgrad=1) and not reasons(linears)


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "two sizes"])
def test_dynamic_batch(marked: bool) -> None:
    model = nn.Sequential(nn.Linear(SIZE, 48), nn.ReLU(), nn.Linear(48, SIZE))
    fn = compiled(model, linears="tensorwise", saved="off", **{"linears.emulate": True})
    for size in (8, 5, 13):
        x = rows(size, SIZE)
        if marked:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(results(fn, trained(model, x), x), by_emulation(model, x))
    report = fp8compile.report(fn)  # type: ignore[arg-type]
    assert len(report.graphs) == (1 if marked else 2)
    for path in ("0", "2"):
        assert directions(report.graphs[-1].notes.linears, path) == ALL_THREE


# ----------------------------------------------------------------------------------------------------- weights


def test_a_frozen_weight_has_no_wgrad() -> None:
    model, x = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), rows()
    model[0].weight.requires_grad_(False)
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears, "0") == Counter(forward=1, dgrad=1)
    assert directions(linears, "1") == ALL_THREE


class Shared(nn.Module):
    """Two linears, one parameter, one of them run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(torch.relu(self.a(x)))))  # type: ignore[no-any-return]


def test_a_parameter_of_several_linears() -> None:
    model, x = Shared(), rows()
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears, "a") == Counter(forward=2, dgrad=2, wgrad=2)
    assert directions(linears, "b") == ALL_THREE


def test_a_weight_used_by_two_linears_on_the_same_input() -> None:
    model, x = Function(lambda x, w: F.linear(x, w) * F.linear(x, w)), rows()
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears) == Counter(forward=2, dgrad=2, wgrad=2) and not reasons(linears)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "F.linear(x, w.t())": (lambda x, w: F.linear(x, w.t()), lambda x, w: linear(x, w.t())),
    "x @ w": (lambda x, w: x @ w, lambda x, w: linear(x, w.t())),
    "x @ w.t()": (lambda x, w: x @ w.t(), linear),
    "w @ x": (lambda x, w: w @ x, lambda x, w: linear(x.t(), w).t()),
    "w.t() @ x": (lambda x, w: w.t() @ x, lambda x, w: linear(x.t(), w.t()).t()),
    "einsum": (lambda x, w: torch.einsum("mk,nk->mn", x, w), F.linear),
    "addmm": (lambda x, w: torch.addmm(w[0], x, w.t()), lambda x, w: linear(x, w) + w[0]),
    "baddbmm of one": (lambda x, w: torch.baddbmm(x[None], x[None], w[None]), lambda x, w: x[None] + x @ w),
}


BATCHED = ("einsum", "baddbmm of one")  # einsum is a bmm over a batch of one


@pytest.mark.parametrize("name", PRODUCTS)
def test_however_the_product_is_written(name: str) -> None:
    written, meant = PRODUCTS[name]
    model, x = Function(written), rows(SIZE, SIZE)
    reference = Function(meant)
    reference.weight = model.weight
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, plain(reference, x))
    if name in BATCHED:
        assert list(reasons(linears)) == ["a batched matmul of parameters (experts) is left in its dtype"]
    else:
        assert directions(linears) == ALL_THREE and not reasons(linears)


@pytest.mark.parametrize("scales", [{"alpha": 0.5}, {"beta": 2.0}, {"alpha": 0.5, "beta": 2.0}])
def test_addmm_with_alpha_or_beta(scales: dict[str, float]) -> None:
    model, x = Function(lambda x, w: torch.addmm(x, x, w, **scales)), rows()  # type: ignore[call-overload]
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, plain(model, x))
    assert reasons(linears) == {"addmm with alpha or beta": 3}


def test_a_weight_made_from_parameters() -> None:
    def merged(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w[:16].tanh())

    model, x = Function(merged), rows()
    ours, linears = run(model, x)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears) == ALL_THREE


# ---------------------------------------------------------------------------------------- around the linears


class Mutated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).add_(1.0).relu_()
        return self.b(y).mul_(0.5)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(lambda t: self.b(torch.tanh(self.a(t))), x, use_reentrant=False)
        assert isinstance(y, Tensor)
        return y.sin()


@pytest.mark.parametrize("model", [Mutated, Checkpointed])
@pytest.mark.parametrize(
    "options", [{}, {"preset": "default", "saved.min_numel": 0}], ids=["linears", "with storage"]
)
def test_in_place_and_checkpointed(model: type[nn.Module], options: dict[str, Any]) -> None:
    made, x = model(), rows()
    ours, linears = run(made, x, **options)
    reference = by_emulation(made, x)
    torch.testing.assert_close(ours[0], reference[0])
    assert all(t.isfinite().all() for t in ours)
    if not options:
        torch.testing.assert_close(ours, reference)
    for path in ("a", "b"):
        assert directions(linears, path) == ALL_THREE
    assert not reasons(linears)


class Counting(nn.Module):
    """A frozen linear of a buffer that changes between two of its uses."""

    state: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(8, SIZE))
        self.a = nn.Linear(SIZE, SIZE).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        before = self.a(self.state)
        self.state.add_(1.0)
        return before + self.a(self.state) * 2 + self.a(x)  # type: ignore[no-any-return]


def test_an_input_mutated_between_its_uses_is_encoded_twice() -> None:
    model, x = Counting(), rows()
    state = model.state.clone()
    ours, linears = run(model, x)
    assert torch.equal(model.state, state + 1.0)
    model.state.copy_(state)
    torch.testing.assert_close(ours, by_emulation(model, x))
    assert directions(linears, "a") == Counter(forward=3, dgrad=1)


def test_a_module_set_off() -> None:
    model, x = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)), rows()
    recipe = Recipe(
        saved="off", linears={"emulate": True}, debug={"codegen": "eager"}, modules={"1": {"linears": "off"}}
    )
    fn = torch.compile(model, backend="fp8compile", options={"recipe": recipe})  # type: ignore[dict-item]
    ours = results(fn, trained(model, x), x)

    def half(x: Tensor) -> Tensor:
        return F.linear(linear(x, *model[0].parameters()), *model[1].parameters())

    torch.testing.assert_close(ours, results(half, trained(model, x), x))
    linears = matmul_entries(fp8compile.report(fn))  # type: ignore[arg-type]
    assert directions(linears, "0") == ALL_THREE
    assert reasons(linears) == {"Recipe.linears is off for module '1'": 3}
    assert "Recipe.modules" not in str(fp8compile.report(fn).remarks)  # type: ignore[arg-type]
