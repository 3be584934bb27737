"""set_recipe: what is compiled again and what is not, what stays untouched, modules, graph breaks, errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import Recipe
from fp8compile import _torch as private
from fp8compile.tools.compiled_module import running

needs_regions = pytest.mark.skipif(
    not private.HAS_REGIONS, reason="this torch has no isolate_recompiles: all recipes share one recompile_limit"
)


class Block(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(64, 256), nn.Linear(256, 64), breaks

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sigmoid(self.up(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.tanh(self.down(h))


class Net(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(breaks) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def net(in_place: bool = False, *, breaks: bool = False, **arguments: Any) -> nn.Module:
    model = Net(breaks)
    arguments = {"options": {"debug.codegen": "eager"}, **arguments}
    if in_place:
        model.compile(backend="fp8compile", **arguments)
        return model
    return torch.compile(model, backend="fp8compile", **arguments)  # type: ignore[return-value]


def compiled_in_a_step(model: nn.Module, batch: int = 128) -> int:
    """How many graphs one forward and backward compiles."""
    before = private.counters["stats"]["unique_graphs"]
    x = torch.randn(batch, 64, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return private.counters["stats"]["unique_graphs"] - before


def off_in(model: nn.Module) -> set[str]:
    """The layers in which nothing is encoded, because the recipe is off there."""
    report = fp8compile.report(model)
    encoded = {s.origin.module[:8] for s in report.saved}
    return {s.origin.module[:8] for s in report.skips if "Recipe.saved is off" in s.reason} - encoded


@pytest.mark.parametrize("in_place", [False, True])
def test_one_compilation_for_each_graph_and_none_for_the_way_back(in_place: bool) -> None:
    model = net(in_place)
    assert (compiled_in_a_step(model), compiled_in_a_step(model)) == (1, 0)
    plain = fp8compile.report(model).saved_bytes_plain
    assert fp8compile.report(model).saved_bytes < plain / 2
    fp8compile.set_recipe(model, "off")
    assert (compiled_in_a_step(model), compiled_in_a_step(model)) == (1, 0)
    report = fp8compile.report(model)
    assert len(report.graphs) == 1 and report.saved_bytes == plain and not report.saved
    fp8compile.set_recipe(model, "default")
    assert compiled_in_a_step(model) == 0 and len(fp8compile.report(model).saved) >= 6
    fp8compile.set_recipe(model, "off")
    assert compiled_in_a_step(model) == 0 and not fp8compile.report(model).saved


@pytest.mark.parametrize("in_place", [False, True])
def test_the_model_the_optimizer_and_hooks_stay_as_they_are(in_place: bool) -> None:
    model = net(in_place)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("forward"))
    compiled_in_a_step(model)
    optimizer.step()
    names, tensors = list(model.state_dict()), [*model.parameters()]
    values, states = [t.detach().clone() for t in tensors], [optimizer.state[t]["exp_avg"] for t in tensors]
    model.train(False)
    fp8compile.set_recipe(model, "off", "layers.0")
    assert not model.training
    assert list(model.state_dict()) == names and all(a is b for a, b in zip(tensors, model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values, tensors, strict=True))
    assert all(a is optimizer.state[t]["exp_avg"] for a, t in zip(states, tensors, strict=True))
    assert all(name.startswith("_orig_mod.") is not in_place for name in names)
    compiled_in_a_step(model)
    assert seen == ["forward", "forward"]


def test_calls_compose_and_the_later_one_decides() -> None:
    model = net()
    compiled_in_a_step(model)
    for recipe, modules, off in [
        ("off", "layers.0", {"layers.0"}),
        ("off", ["layers.1.*", "layers.2"], {"layers.0", "layers.1", "layers.2"}),
        ("default", "layers.?", set()),
        ("off", "layers.2", {"layers.2"}),
        ({"saved": "int8"}, None, set()),
    ]:
        fp8compile.set_recipe(model, recipe, modules)  # type: ignore[arg-type]
        compiled_in_a_step(model)
        found = off_in(model)
        assert found == off or found == off - {"layers.1"}, "what layers.1 itself makes is not beneath it"
    assert {s.codec for s in fp8compile.report(model).saved} == {"int8 1x128"}


def test_the_old_recipe_for_the_same_modules_is_the_old_code() -> None:
    model = net()
    compiled_in_a_step(model)
    fp8compile.set_recipe(model, "off", "layers.0")
    fp8compile.set_recipe(model, "off", "layers.1")
    assert compiled_in_a_step(model) == 1
    assert fp8compile.set_recipe(model, "default", ["layers.0", "layers.1"]) == Recipe(debug={"codegen": "eager"})
    assert compiled_in_a_step(model) == 0


def test_what_a_layer_in_16_bit_makes_is_exact() -> None:
    """A tensor belongs to the module that made it: layers.2.up reads what layers.1 made, so its weight's gradient differs."""
    model = net()
    fp8compile.set_recipe(model, "off", "layers.2")  # before the first step
    compiled_in_a_step(model)
    ours = {n: p.grad for n, p in model.named_parameters()}
    exact = net(options={"preset": "off", "debug.codegen": "eager"})
    exact.load_state_dict(model.state_dict())
    compiled_in_a_step(exact)
    for name, p in exact.named_parameters():
        same = torch.equal(p.grad, ours[name])  # type: ignore[arg-type]
        assert same == ("layers.2" in name and not name.endswith("up.weight")), name


def test_both_sides_of_a_graph_break_change() -> None:
    model = net(breaks=True)
    graphs = compiled_in_a_step(model)
    assert graphs > 1 and compiled_in_a_step(model) == 0
    assert len(fp8compile.report(model).saved) > 1
    fp8compile.set_recipe(model, "off")
    assert (compiled_in_a_step(model), compiled_in_a_step(model)) == (graphs, 0)
    report = fp8compile.report(model)
    assert len(report.graphs) == graphs and not report.saved
    fp8compile.set_recipe(model, "default")
    assert compiled_in_a_step(model) == 0


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_recipe_of_one_layer_is_that_of_this_layer_alone(breaks: bool, layer: int) -> None:
    """Dynamo compiles the broken block by itself and runs for another one what it compiled for the first."""
    model = net(breaks=breaks)
    fp8compile.set_recipe(model, "off", f"layers.{layer}")
    compiled_in_a_step(model)
    report = fp8compile.report(model)
    stored = {entry.origin.module.split(".")[1] for entry in report.saved if "layers" in entry.origin.module}
    assert stored == {"0", "1", "2"} - {str(layer)} and not report.remarks


def test_mode_dynamic_fullgraph_and_the_limit_are_kept() -> None:
    model = net(mode="max-autotune-no-cudagraphs", dynamic=True, fullgraph=True, options=None)
    fp8compile.set_recipe(model, Recipe(debug={"codegen": "eager"}))
    told = running(model)
    assert told is not None and told.recipe == Recipe(debug={"codegen": "eager"})
    assert told.first["mode"] == "max-autotune-no-cudagraphs" and told.others == {"dynamic": True, "fullgraph": True}
    backend = private.innermost_backend(model.dynamo_ctx.callback).compiler_fn  # type: ignore[attr-defined]
    assert backend.mode == "max-autotune-no-cudagraphs"
    assert [compiled_in_a_step(model, batch) for batch in (128, 96, 64)] == [1, 0, 0]


@needs_regions
def test_more_recipes_than_dynamo_compiles_for_one_piece_of_code() -> None:
    with private.dynamo_config.patch(recompile_limit=2):
        model = net(fullgraph=True)
        for step in range(4):
            fp8compile.set_recipe(model, {"saved.min_numel": step})
            assert compiled_in_a_step(model) == 1, step


def test_a_filter_of_guards_is_kept() -> None:
    model = net(options={"debug.codegen": "eager", "guard_filter_fn": lambda guards: [True for _ in guards]})
    keep = model.dynamo_ctx._hooks.guard_filter_fn  # type: ignore[union-attr]
    for recipe in ("off", "default"):
        fp8compile.set_recipe(model, recipe)
        assert model.dynamo_ctx._hooks.guard_filter_fn is keep  # type: ignore[union-attr]
        assert compiled_in_a_step(model) == 1


def test_explain_follows() -> None:
    model = net()
    fp8compile.set_recipe(model, "off")
    assert not fp8compile.explain(model, (torch.randn(128, 64),)).saved
    with pytest.raises(ValueError, match="run one step first"):
        fp8compile.report(model)


def test_a_recipe_is_an_option_of_torch_compile() -> None:
    model = net(options={"recipe": Recipe(debug={"codegen": "eager"}, modules={"layers.0": "off"})})
    compiled_in_a_step(model)
    assert off_in(model) == {"layers.0"}
    assert "in layers.0: linears='off', saved='off'" in str(fp8compile.report(model))


def test_blocks_compiled_in_place_have_recipes_of_their_own() -> None:
    model = Net()
    for layer in model.layers:
        layer.compile(backend="fp8compile", options={"debug.codegen": "eager"})
    compiled_in_a_step(model)
    fp8compile.set_recipe(model.layers[1], "off")
    assert compiled_in_a_step(model) == 1
    assert fp8compile.report(model.layers[0]).saved
    with pytest.raises(ValueError, match=r"call it for each of those in it: layers.0, layers.1, layers.2"):
        fp8compile.set_recipe(model, "off")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("of",), "no preset 'of'. Did you mean 'off'?"),
        (({"saved_fromat": "int8"},), "no field 'saved_fromat'. Did you mean 'saved.format'?"),
        ((3,), "A recipe is a Recipe, the name of a preset or a dict of its fields, not 3"),
        (("off", "layer.0"), "no module of this Net matches 'layer.0'. Did you mean 'layers.0'?"),
        (("off", ["layers.0", "layers.7.*"]), "no module of this Net matches 'layers.7.*'"),
        ((Recipe(modules={"layers.0": "off"}), "layers.1"), "holds modules of its own"),
        (
            ({"debug.codegen": "inductor", "debug.inductor": {"debug": True}}, "layers.1"),
            "sets debug.inductor, which cannot differ",
        ),
    ],
)
def test_what_cannot_be_set_is_named_and_changes_nothing(arguments: tuple[Any, ...], message: str) -> None:
    model = net()
    with pytest.raises(ValueError) as caught:
        fp8compile.set_recipe(model, *arguments)
    assert message in str(caught.value)
    told = running(model)
    assert told is not None and told.recipe == Recipe(debug={"codegen": "eager"})


def test_a_model_that_is_not_ours_is_refused() -> None:
    cure = r"model = torch.compile\(model, backend=\"fp8compile\"\)"
    with pytest.raises(ValueError, match=f"this Net is not compiled; compile it first: {cure}"):
        fp8compile.set_recipe(Net(), "off")
    with pytest.raises(ValueError, match="this Net is compiled by another backend than fp8compile"):
        fp8compile.set_recipe(torch.compile(Net(), backend="eager"), "off")
    other = Net()
    other.compile(backend="eager")
    with pytest.raises(ValueError, match="this Net is compiled by another backend"):
        fp8compile.set_recipe(other, "off")
    with pytest.raises(ValueError, match="takes a compiled module, not a function"):
        fp8compile.set_recipe(torch.compile(lambda x: x, backend="fp8compile"), "off")  # type: ignore[arg-type]


@needs_regions
def test_no_setting_of_dynamo_is_written_and_each_recipe_has_the_whole_limit() -> None:
    """Six shapes for each of three recipes, in a Dynamo that compiles a piece of code six times."""
    with private.dynamo_config.patch(recompile_limit=6, automatic_dynamic_shapes=False):
        model = net(fullgraph=True)
        for recipe in ("default", "off", {"saved": "auto"}):
            fp8compile.set_recipe(model, recipe)  # type: ignore[arg-type]
            assert [compiled_in_a_step(model, 32 * n) for n in range(1, 7)] == [1] * 6
        fp8compile.set_recipe(model, "default")
        assert [compiled_in_a_step(model, 32 * n) for n in range(1, 7)] == [0] * 6
        assert private.dynamo_config.recompile_limit == 6


@needs_regions
def test_recipes_set_by_another_thread_run() -> None:
    """Dynamo's settings are a thread's own: what a thread raises, the one that runs the model does not see."""
    with private.dynamo_config.patch(recompile_limit=2):
        model = net()
        compiled_in_a_step(model)
        for size in range(1, 6):
            worker = threading.Thread(target=fp8compile.set_recipe, args=(model, {"saved.group_size": 128 + size}))
            worker.start()
            worker.join()
            assert compiled_in_a_step(model) == 1
            assert f"'group_size': {128 + size}" in fp8compile.report(model).recipe


def test_a_recipe_without_a_compiled_graph_is_told() -> None:
    with private.dynamo_config.patch(accumulated_recompile_limit=1):
        model = net()
        assert compiled_in_a_step(model) == 1
        fp8compile.set_recipe(model, "off")
        assert compiled_in_a_step(model) == 0, "Dynamo's limit over all regions, which is not ours to raise"
        with pytest.raises(ValueError, match=r"for the recipe that runs now.*runs as plain eager.*recompile_limit"):
            fp8compile.report(model)


@needs_regions
@pytest.mark.parametrize("in_place", [False, True])
def test_a_region_that_the_user_asked_for_is_kept(in_place: bool) -> None:
    model = net(in_place, isolate_recompiles=True)
    before = private.region_of(private.context_of(model))
    assert compiled_in_a_step(model) == 1
    for recipe, compilations in (("off", 1), ("default", 0), ("off", 0)):
        fp8compile.set_recipe(model, recipe)
        told = running(model)
        assert told is not None and told.others["isolate_recompiles"] is True
        assert compiled_in_a_step(model) == compilations
        assert (private.region_of(private.context_of(model)) == before) == (recipe == "default")
