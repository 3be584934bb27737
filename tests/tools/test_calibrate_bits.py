"""fp8compile.tools.calibrate_bits: what it measures, what it chooses, and models that it refuses."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile.compiler.cache_key import key_of
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.metrics import power
from fp8compile.recipe.context import Context
from fp8compile.recipe.saved_bits import SavedBits
from fp8compile.tools import calibrate_bits
from fp8compile.tools.choosing_bits import _weights
from tests.support.graphs import split_of
from tests.support.measure import compiled, kept_bytes, llama_case
from tests.support.net import SwiGLU

OPTIONS: dict[str, Any] = {"linears": "off", "saved.min_numel": 0}
RECIPE = Recipe(linears="off", saved={"min_numel": 0})


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.Linear(128, 64))


def gradients(fn: Any, of: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss(fn(x)), list(of.parameters())))


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return sum(power(a.double() - b.double()) for a, b in zip(found, exact, strict=True)) / sum(map(power, exact))


def measured(of: nn.Module, x: Tensor, **options: Any) -> Recipe:
    return calibrate_bits(of, [x], **{"recipe": RECIPE, "loss": loss, "weigh": "power", **options})


# ---------------------------------------------------------------------------------------------- what is measured


def test_an_error_is_that_of_the_compiled_model_with_that_value_alone_in_these_bits() -> None:
    net, x = model(), torch.randn(256, 64)
    bits = measured(net, x).saved.bits
    exact = gradients(net, net, x)
    whole = SavedBits(tuple(dataclasses.replace(value, chosen="exact") for value in bits.values))
    assert [value.key.module for value in whole.values] == ["0", "2"]
    for at, value in enumerate(whole.values):
        for name, choice in value.choices:
            torch._dynamo.reset()
            alone = list(whole.values)
            alone[at] = dataclasses.replace(value, chosen=name)
            fn = compiled(net, **OPTIONS, **{"saved.bits": SavedBits(tuple(alone))})
            found = error(gradients(fn, net, x), exact)
            assert found == pytest.approx(choice.error, rel=1e-3, abs=1e-12), (value.key, name)


def test_of_a_linear_layer_it_is_the_error_of_the_value_itself() -> None:
    """dW = dy' x is linear in x: by hand, without a graph."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(128, 64)
    (value,) = measured(net, x).saved.bits.values
    first, second = net
    h = first(x)
    dy = 2 * second(h) / 8192
    exact = gradients(net, net, x)
    for name, choice in value.choices[:5]:
        codec = FewBits(int(name[0]))
        off = codec.decode(*codec.encode(h.detach()), h.shape, h.dtype) - h
        assert choice.error == pytest.approx(power(dy.T @ off) / sum(map(power, exact)), rel=1e-3)


def test_small_gradients_count_by_their_norm_and_not_by_its_square() -> None:
    """Of two losses side by side, one with gradients a thousand times as small as the other's."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.large(x), 0.03 * self.small(x)])

    torch.manual_seed(0)
    net, x = Beside(), torch.randn(256, 64)
    shares = {}
    for weigh in ("power", "norm"):
        by_module = {
            v.key.module: dict(v.choices)["4bit"].error for v in measured(net, x, weigh=weigh).saved.bits.values
        }
        shares[weigh] = by_module["small.0"] / by_module["large.0"]
    assert shares["norm"] / shares["power"] == pytest.approx(1 / 0.03**2, rel=0.5)


def test_gradients_that_are_zero_up_to_rounding_decide_nothing() -> None:
    assert _weights([1.0, 0.0, 1e-30], "norm") == pytest.approx([1.0, 1e3, 1e3], rel=1e-6)
    assert _weights([3.0, 1.0], "power") == [0.25, 0.25]


def test_bytes_are_those_that_are_saved() -> None:
    net, x = model(), torch.randn(256, 64)
    bits = measured(net, x, bits=3.5).saved.bits
    torch._dynamo.reset()
    split = split_of(net, x, **OPTIONS, **{"saved.bits": bits})
    assert split.saved_bytes() >= bits.nbytes
    torch._dynamo.reset()
    fn = compiled(net, **OPTIONS, **{"saved.bits": bits})
    fn(x)
    assert sum(s.bytes_after for s in fp8compile.report(fn).saved) == bits.nbytes  # type: ignore[arg-type]


def test_what_codes_cost_leaves_nothing_unmeasured() -> None:
    """A budget of bytes is asked for: a device's rates price no code."""
    net, x = model(), torch.randn(256, 64)
    priced = RECIPE.changed({"debug.device_rates": "h100"})
    assert measured(net, x, bits=3.5, recipe=priced).saved.bits == measured(net, x, bits=3.5).saved.bits


def test_what_is_not_measured_follows_by_the_square_of_the_step() -> None:
    net, x = model(), torch.randn(512, 64)
    all_six = measured(net, x).saved.bits
    one = measured(net, x, measured=(4,)).saved.bits
    for whole, scaled in zip(all_six.values, one.values, strict=True):
        known, guessed = dict(whole.choices), dict(scaled.choices)
        assert known["4bit"] == guessed["4bit"] and known["6bit"] != guessed["6bit"]
        assert guessed["6bit"].error == pytest.approx(known["4bit"].error * (15 / 63) ** 2, rel=1e-6)
        assert 0.5 < guessed["6bit"].error / known["6bit"].error < 2, whole.key


def test_batches_are_averaged_and_shapes_may_differ() -> None:
    net, a, b = model(), torch.randn(256, 64), torch.randn(128, 64)
    one, other = (measured(net, x).saved.bits.values for x in (a, b))
    both = calibrate_bits(net, [a, b], recipe=RECIPE, loss=loss, weigh="power").saved.bits.values
    assert [v.key for v in both] == [v.key for v in one]
    for first, second, mean in zip(one, other, both, strict=True):
        assert mean.numel == first.numel == 2 * second.numel
        for (name, x), (_, y) in zip(first.choices, second.choices, strict=True):
            assert dict(mean.choices)[name].error == pytest.approx((x.error + y.error) / 2, rel=1e-6)


def test_nothing_is_left_changed() -> None:
    net, x = nn.Sequential(model(), nn.BatchNorm1d(64), nn.Dropout(0.5)), torch.randn(256, 64)
    before, state = copy.deepcopy(net.state_dict()), torch.random.get_rng_state()
    measured(net, x)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state) and all(p.grad is None for p in net.parameters())


def test_across_a_graph_break_errors_reach_the_graph_before() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model(0), model(1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            torch._dynamo.graph_break()
            return self.second(h)

    net, x = Broken(), torch.randn(256, 64)
    bits = measured(net, x, bits=4).saved.bits
    assert {value.key.module.split(".")[0] for value in bits.values} >= {"first", "second"}
    torch._dynamo.reset()
    fn = compiled(net, **OPTIONS, **{"saved.bits": bits})
    exact = gradients(net, net, x)
    assert error(gradients(fn, net, x), exact) == pytest.approx(bits.error, rel=0.5)
    named = {s.origin.module: s.codec for s in fp8compile.report(fn).saved}  # type: ignore[arg-type]
    assert all("adds" in codec for codec in named.values()) and len(named) >= 3


def test_a_graph_that_is_measured_shares_no_report_with_one_that_trains() -> None:
    gm, x = torch.fx.symbolic_trace(nn.Linear(8, 8)), torch.randn(4, 8)
    keys = {key_of(gm, [x], Context(RECIPE, measures_saved=measures), {}) for measures in (False, True)}
    assert len(keys) == 2


# ------------------------------------------------------------------------------------------------ what is chosen


def llama(output: float = 1.0) -> tuple[nn.Module, tuple[Tensor, ...], SavedBits]:
    """A small layer, whose attention's output projection is that much as large, its arguments, and its measured bits."""
    layer, args = llama_case(seq=64, hidden=128, ffn=344, dtype=torch.float32)
    layer.o.weight.data *= output
    recipe = Recipe(linears="off")
    found = calibrate_bits(layer, [args], bits=4, recipe=recipe, loss=loss, weigh="power")
    return layer, args, found.saved.bits


def least_error(bits: SavedBits, budget: int) -> float:
    """By trying all choices, value by value; what takes more bytes for more error than another is left out."""
    tried = [(0, 0.0)]
    for value in bits.values:
        more = [(size + c.nbytes, off + c.error) for size, off in tried for _, c in value.choices]
        within = sorted(pair for pair in more if pair[0] <= budget)
        tried = [pair for i, pair in enumerate(within) if not i or pair[1] < min(off for _, off in within[:i])]
    return min(off for _, off in tried)


def test_the_choice_has_the_least_error_of_all() -> None:
    """In this layer four bits for all are the best choice of 4 bits: each value adds much the same to the error."""
    _, _, bits = llama()
    for each in (3, 3.5, 4, 4.5, 5):
        chosen = bits.within(each)
        assert chosen.error == pytest.approx(least_error(bits, bits.bytes_at(each)), rel=1e-9)
    assert {value.chosen for value in bits.within(4).values} == {"4bit"}
    assert len({value.chosen for value in bits.within(3.5).values}) > 1


def test_a_llama_layer_has_less_error_than_with_the_same_bits_for_all() -> None:
    """Attention that adds a twentieth as much to its layer may have fewer bits: by its own sum 1.7 times less error."""
    layer, args, bits = llama(output=0.05)
    assert bits.error < bits.uniform(4).error / 1.5
    exact = gradients(lambda _: layer(*args), layer, args[0])
    errors, kept = {}, {}
    for name, options in {
        "adaptive": {"saved.bits": bits},
        "uniform": {"saved": "4bit", "saved.attention_format": "4bit"},
    }.items():
        torch._dynamo.reset()
        fn = compiled(layer, linears="off", **options)
        kept[name] = kept_bytes(layer, fn, args)
        errors[name] = error(gradients(lambda _, fn=fn: fn(*args), layer, args[0]), exact)
    assert kept["adaptive"] <= kept["uniform"]
    assert errors["adaptive"] < errors["uniform"] / 1.2, errors


def test_the_recipe_is_the_one_given_with_the_choice_in_all_modules(tmp_path: Path) -> None:
    net, x = model(), torch.randn(256, 64)
    given = dataclasses.replace(RECIPE, modules={"0": {"skip": ("nowhere",)}})
    found = calibrate_bits(net, [x], bits=4, recipe=given, loss=loss)
    assert found.replace_in_all({"saved.bits": "off"}) == given.replace_in_all({"saved.bits": "off"})
    assert found.at("0").saved.bits == found.saved.bits and found.saved.bits.nbytes <= found.saved.bits.bytes_at(4)
    found.saved.bits.save(tmp_path / "bits.json")
    assert Recipe(linears="off", saved={"bits": str(tmp_path / "bits.json")}).saved.bits == found.saved.bits


def test_explain_shows_the_choice() -> None:
    net, x = model(), torch.randn(256, 64)
    report = fp8compile.explain(net, (x,), recipe=measured(net, x, bits=3), loss=loss)
    assert "SavedBits(" in str(report)
    assert len(report.saved) == 2 and all("to the gradients' error" in each.codec for each in report.saved)


def test_blocks_with_another_choice_are_compiled_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.inner(x)  # type: ignore[no-any-return]

    net, x = nn.Sequential(*(Block() for _ in range(3))), torch.randn(256, 64)
    bits = measured(net, x, measured=(4,)).saved.bits.uniform(6)
    of_second = [v.key.module.startswith("1.") for v in bits.values]
    four = bits.uniform(4).values
    bits = SavedBits(tuple(b if there else a for a, b, there in zip(bits.values, four, of_second, strict=True)))
    torch._dynamo.reset()
    fp8compile.compile_blocks(net, {**OPTIONS, "saved.bits": bits, "debug.codegen": "eager"})
    loss(net(x)).backward()
    named = {(s.origin.module, s.codec.split(" ")[0]) for s in fp8compile.report(net).saved if s.origin.module}
    inside = {(v.key.module, v.chosen) for v in bits.values if ".inner." in v.key.module}
    assert inside <= named and {name for _, name in inside} == {"4bit", "6bit"}


# --------------------------------------------------------------------------------------------- what it refuses


def refused(message: str, net: nn.Module, *args: Any, **options: Any) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate_bits(net, *args, **{"recipe": RECIPE, "loss": loss, **options})


def test_a_model_that_stores_nothing_is_refused() -> None:
    x = torch.randn(256, 64)
    refused("nothing to choose: the recipe stores no value .*Recipe.saved is 'off'", model(), [x], recipe="off")
    refused("nothing to choose: the recipe stores no value", nn.Linear(64, 64), [x])
    refused("nothing to choose", model(), [x], recipe=Recipe(linears="off", saved={"min_numel": 10**9}))


@pytest.mark.parametrize(
    ("message", "batches", "options"),
    [
        ("bits must be a number from 2 to 16", [torch.ones(8, 64)], {"bits": 1}),
        ("bits must be a number from 2 to 16", [torch.ones(8, 64)], {"bits": "4bit"}),
        ("give bits, such as bits=4.0, or nbytes, and not both", [torch.ones(8, 64)], {"bits": 4, "nbytes": 100}),
        ("nbytes=10 is too little: the fewest bits", [torch.randn(8, 64)], {"nbytes": 10}),
        ("measured must be some of 2, 3, 4, 5, 6, 8, not \\(7,\\)", [torch.ones(8, 64)], {"measured": (7,)}),
        ("measured must be some of", [torch.ones(8, 64)], {"measured": ()}),
        ("weigh cannot be 'norms'. Did you mean 'norm'", [torch.ones(8, 64)], {"weigh": "norms"}),
        ("batches is a Tensor; give a list", torch.ones(8, 64), {}),
        ("no batches", [], {}),
        ("batch 0: the squared norm of the gradients is inf", [torch.full((8, 64), torch.nan)], {}),
        ("batch 0: the squared norm of the gradients is 0", [torch.ones(8, 64)], {"loss": lambda y: (y * 0).sum()}),
        ("loss must return a scalar", [torch.ones(8, 64)], {"loss": lambda y: y}),
    ],
)
def test_bad_input_is_refused_with_the_cure(message: str, batches: Any, options: dict[str, Any]) -> None:
    refused(message, model(), batches, **options)


def test_a_frozen_model_has_nothing_to_differentiate() -> None:
    refused("nothing to differentiate", model().requires_grad_(False), [torch.ones(8, 64)])


def test_a_function_is_no_module() -> None:
    with pytest.raises(ValueError, match=r"fp8compile.tools.calibrate_bits takes a module"):
        calibrate_bits(F.gelu, [torch.ones(8)])  # type: ignore[arg-type]


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.inner, self.breaks = model(), breaks

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.inner(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x.sin()


def test_alike_blocks_with_graph_breaks_are_refused() -> None:
    """Dynamo runs the graph of one for the next, and values of both parts have one name."""
    net = nn.Sequential(*(Block(breaks=True) for _ in range(3)))
    refused("cannot be told apart. Graph breaks make them", net, [torch.randn(256, 64)])


def test_nested_compile_regions_are_refused() -> None:
    class Regions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = self.region(block, x)
            return x

        @torch.compiler.nested_compile_region
        def region(self, block: nn.Module, x: Tensor) -> Tensor:
            y: Tensor = block(x)
            return y

    refused("nested compile regions", Regions(), [torch.randn(256, 64)])


def test_a_value_that_may_have_no_bits_that_are_measured_is_measured_in_the_nearest() -> None:
    bits = measured(SwiGLU(), torch.randn(256, 64), measured=(2,)).saved.bits
    least = [dict(value.choices)[value.choices[0][0]].error for value in bits.values]
    assert {value.choices[0][0] for value in bits.values} > {"2bit"}, "one may not have two bits"
    assert all(error > 0 for error in least)


def test_a_memory_budget_is_left_out_of_the_measurement() -> None:
    net, x = model(), torch.randn(256, 64)
    whole, given_up = (measured(net, x, recipe=RECIPE.replace_in_all({"memory": b})).saved.bits for b in (1.0, 0.3))
    assert whole == given_up


def test_another_path_of_the_model_trains_and_says_so() -> None:
    class Paths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = model(0), model(1)

        def forward(self, x: Tensor, path: int) -> Tensor:
            y: Tensor = (self.first if path == 0 else self.second)(x)
            return y

    net, x = Paths(), torch.randn(256, 64)
    recipe = calibrate_bits(net, [(x, 0)], recipe=RECIPE, loss=loss)
    torch._dynamo.reset()
    fn = compiled(
        net,
        **OPTIONS,
        **{"saved.bits": recipe.saved.bits},
    )
    loss(fn(x, 0)).backward()
    with pytest.warns(UserWarning, match="none of its .* values is in this graph"):
        loss(fn(x, 1)).backward()
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("nbytes", [float("nan"), "100", True, 1.5])
def test_a_budget_that_is_no_count_is_refused(nbytes: Any) -> None:
    refused("nbytes must be a whole number of bytes", model(), [torch.ones(8, 64)], nbytes=nbytes)


def test_groups_that_hold_no_few_bits_are_refused() -> None:
    refused(
        "saved.group_size=100", model(), [torch.ones(8, 64)], recipe=RECIPE.replace_in_all({"saved.group_size": 100})
    )
