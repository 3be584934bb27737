"""compile_blocks: which modules are blocks, how often they are compiled, what a block's graph knows of its model, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile import _torch as private

needs_regions = pytest.mark.skipif(
    not private.HAS_REGIONS, reason="this torch.compile has no recompile_limit argument"
)
EAGER: dict[str, Any] = {"debug.codegen": "eager"}


class Block(nn.Module):
    def __init__(self, width: int = 64, number: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), number

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x))) * (1 + self.number)


class Net(nn.Module):
    """Blocks between an embedding and an output head, as language models have them."""

    def __init__(self, depth: int = 3, numbered: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(Block(number=i if numbered else 0) for i in range(depth))
        self.lm_head = nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


TOKENS = torch.arange(4096).reshape(4, 1024) % 64


def graphs_in_a_step(model: nn.Module) -> int:
    before = private.counters["stats"]["unique_graphs"]
    model(TOKENS).square().mean().backward()
    return private.counters["stats"]["unique_graphs"] - before


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.get_submodule("layers").parameters() if p.grad is not None]


def test_alike_blocks_are_compiled_once_and_named_from_the_model() -> None:
    torch.manual_seed(0)
    model = Net(depth=12)
    whole = copy.deepcopy(model)
    done = fp8compile.compile_blocks(model, EAGER | {"linears.emulate": True})
    assert str(done) == "12 blocks of 1 kind compiled: layers.0-11. Outside of them, as they are: embed, lm_head"
    assert (done.paths, done.kinds) == (tuple(f"layers.{i}" for i in range(12)), 1)
    assert graphs_in_a_step(model) == 1

    whole.compile(backend="fp8compile", options=EAGER | {"linears.emulate": True})
    whole(TOKENS).square().mean().backward()
    ours, theirs = fp8compile.report(model), fp8compile.report(whole)
    assert {e.origin.module for e in ours.linears} == {e.origin.module for e in theirs.linears}
    stored = [(e.origin.module, e.dtype, e.shape) for e in theirs.saved if e.origin.module.startswith("layers")]
    assert sorted((e.origin.module, e.dtype, e.shape) for e in ours.saved) == sorted(stored)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(whole), strict=True))


@needs_regions
def test_none_of_more_blocks_than_dynamo_compiles_a_piece_of_code_ends_in_plain_eager() -> None:
    with private.dynamo_config.patch(recompile_limit=2):
        model = Net(depth=4, numbered=True)
        done = fp8compile.compile_blocks(model, EAGER)
        assert done.kinds == 1  # what a forward reads beside its tensors is not seen from outside
        assert graphs_in_a_step(model) == 4
    assert {e.origin.module.split(".")[1] for e in fp8compile.report(model).saved} == {str(i) for i in range(4)}


def test_a_recipe_by_module_goes_by_the_path_in_the_model() -> None:
    model = Net(depth=3)
    fp8compile.compile_blocks(model, EAGER | {"modules": {"layers.1": "off"}})
    graphs_in_a_step(model)
    stored = {e.origin.module.split(".")[1] for e in fp8compile.report(model).saved}
    assert stored == {"0", "2"}


def test_a_head_inside_a_named_block_is_a_head() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.lm_head = Block(), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.block(x))

    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(64, 64))
    model.add_module("last", Last())
    fp8compile.compile_blocks(model, EAGER | {"linears.emulate": True}, blocks="last")
    graphs_in_a_step(model)
    assert {e.origin.module for e in fp8compile.report(model).linears} == {
        "last.block.up",
        "last.block.down",
    }


def stage(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = stage(width, depth)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x


def holder(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


class First(Block):
    pass


MODELS = {
    "encoder and decoder": (holder(encoder=stage(8, 2), decoder=stage(8, 2)), ["encoder.0-1", "decoder.0-1"], 1),
    "a ModuleDict": (holder(layers=nn.ModuleDict({"0": Block(8), "1": Block(8)})), ["layers.0-1"], 1),
    "stages of several widths": (
        nn.Sequential(Stage(8, 2), Stage(16, 3)),
        ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1", "1.blocks.2"],
        2,
    ),
    "experts are part of a block": (nn.ModuleList([Experts(), Experts()]), ["0-1"], 1),
    "one block unlike the others": (nn.ModuleList([Block(16), Block(8), Block(8)]), ["0-2"], 2),
    "a first of another class is outside": (nn.ModuleList([First(8), Block(8), Block(8)]), ["1-2"], 1),
    "leaves are no blocks": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Block(8), Block(8)), ["2-3"], 1),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found(name: str) -> None:
    model, ranges, kinds = MODELS[name]
    done = fp8compile.compile_blocks(copy.deepcopy(model))
    assert (str(done).split(": ")[1].split(". Outside")[0].split(", "), done.kinds) == (ranges, kinds)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a function": (len, {}, "takes a module, not 'len'"),
    "no blocks": (
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        {},
        r"no two blocks alike.*compile it whole: model\.compile",
    ),
    "one block": (nn.ModuleList([Block(8)]), {}, "no two blocks alike"),
    "layers of torch.nn": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=False),
        {},
        r"torch\.nn's TransformerEncoderLayer, which Dynamo skips",
    ),
    "a layer of torch.nn by name": (Net(2), {"blocks": "embed"}, r"embed is torch\.nn's Embedding"),
    "no such block": (Net(2), {"blocks": "layer.*"}, r"no module of this Net is called 'layer\.\*'"),
    "one in the other": (Net(2), {"blocks": ["layers.0", "layers.*.up"]}, r"lies in|torch\.nn's Linear"),
    "another backend": (Net(2), {"backend": "inductor"}, "the backend is fp8compile; leave backend= out"),
    "a field that does not exist": (Net(2), {"options": {"emulat": True}}, "emulat"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named_and_nothing_is_compiled(name: str) -> None:
    model, arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        fp8compile.compile_blocks(model, **arguments)
    if isinstance(model, nn.Module):
        assert all(module._compiled_call_impl is None for module in model.modules())


def test_a_compiled_model_is_refused() -> None:
    model = Net(2)
    fp8compile.compile_blocks(model, EAGER)
    with pytest.raises(ValueError, match=r"layers\.0 is compiled already.*set_recipe"):
        fp8compile.compile_blocks(model)
    with pytest.raises(ValueError, match="OptimizedModule is compiled already"):
        fp8compile.compile_blocks(torch.compile(Net(2)))  # type: ignore[arg-type]
