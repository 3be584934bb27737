"""Script: optimizer steps in one launch for several parameters. Prints JSON.

assembled     as lowered for sm_90: instructions an element, registers, spilled bytes, beside the kernel of one parameter
interpreted   (under ``TRITON_INTERPRET=1``) whole steps of parameters of many shapes, beside one launch for each of them
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fp8compile import optim
from fp8compile.optim import compiled_numbers, compiled_step, one_launch, step_numbers, traced_once
from fp8compile.optim.open_sizes import Sizes

from . import fake_h100, interpreter, lowering
from .checked import instructions
from .kernel import Kernel
from .measures import print_json
from .optimizers import chunks_of, lowered_chunk, together
from .run_optimizer import CASES

SHAPES: tuple[tuple[int, ...], ...] = (
    (24, 256),
    (16, 128),
    (3, 128),
    (40, 128),
    (64, 3, 3),
    (5, 200),
    (9, 200),
    (8, 128, 3, 2),
    (300,),
    (7,),
    (),
)
Kinds = dict[str, dict[str, Any]]
KINDS: Kinds = {
    "FP32": {},
    "BF16, rounded stochastically": {"dtype": torch.bfloat16},
    "BF16, split, 4 bits": {"dtype": torch.bfloat16, "state_format": "4bit_log", "master": "split"},
    "FP32 states": {"state_format": "fp32"},
    "BF16, all states by groups": {"dtype": torch.bfloat16, "overrides": {"*": "e4m3_expanded"}},
    "Muon": {"optimizer": "Muon"},
}


def assembled(name: str) -> dict[str, Any]:
    """Of a case's first kernel."""
    chunks, _ = chunks_of(CASES[name].build(torch.zeros))
    graph, _ = lowered_chunk(chunks[0])
    found = together(graph, chunks[0][0])
    widths = "8" if found.elements == 2 else "8|16"  # two codes are 16 bits
    narrow = re.findall(rf"ld\.global(?:\.L1::evict_first\S*)?\.b(?:{widths})\b", found.ptx)
    each = instructions(found.code).total() / found.elements
    usage = {"instructions": each, "registers": found.registers, "spilled": found.spilled, "narrow": len(narrow)}
    return {"launches": len(graph.launches), "elements": found.elements, **usage}


@contextmanager
def as_on_a_gpu(*, together: bool) -> Iterator[tuple[list[int], list[tuple[int, ...]]]]:
    """Steps of parameters on the CPU are lowered for a GPU and interpreted. Yields how many blocks each launch has, and the
    shapes of pieces that ran by themselves."""
    blocks: list[int] = []
    alone: list[tuple[int, ...]] = []
    plain, plain_alone = one_launch.OneLaunch.__call__, one_launch._by_itself

    def counted(self: one_launch.OneLaunch, new: Sequence[Any]) -> None:
        blocks.append(len(self._owners))
        plain(self, new)

    def counted_alone(code: Any, piece: one_launch.Piece, new: Sequence[Any]) -> None:
        alone.append(tuple(next(iter(piece.tensors.values())).shape))
        plain_alone(code, piece, new)

    with (
        mock.patch.object(compiled_step, "COMPILED", {}),
        mock.patch.object(one_launch, "_by_itself", counted_alone),
        mock.patch.object(compiled_step, "compile_step", compile_step),
        mock.patch.object(compiled_step, "rows_alone", lambda _: False),
        mock.patch.object(compiled_step.Signature, "is_on_gpu", together),
        mock.patch.object(step_numbers, "in_one_kernel", lambda *_: together),
        mock.patch.object(compiled_numbers, "_known", {}),
        mock.patch.object(compiled_numbers, "_fitting", {}),
        mock.patch.object(compiled_numbers, "lowered", compiled_numbers_there),
        mock.patch.object(one_launch.OneLaunch, "__call__", counted),
    ):
        yield blocks, alone


def compile_step(signature: compiled_step.Signature, sizes: Sizes) -> tuple[Callable[..., Any], Any]:
    lowered = lowering.Lowered()
    graph, flat, fakes = compiled_step.traced_step(signature, sizes)
    with (
        mock.patch.object(lowering, "_executed", lambda _: caught) if signature.may_share else nullcontext(),
        lowering.lowering_config(compiled_step.inductor_options()),
        torch.no_grad(),
    ):
        inner = compiled_step.with_groups_whole(lowering.lower_backend(lowered, execute=True))
        return traced_once.lowered(graph, flat, fakes.mode, inner), fakes


def compiled_numbers_there(graph: torch.fx.GraphModule, flat: list[Any], mode: Any) -> Callable[..., Any]:
    with lowering.lowering_config():
        return traced_once.lowered(graph, flat, mode, lowering.lower_backend(lowering.Lowered(), execute=True))


def caught(kernel: Kernel) -> one_launch.Caught:
    def interpreted(name: str, source: str, device: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            lowering._largest_block_only(lowering.load_kernel(name, source)).run(*args, **kwargs)

        return SimpleNamespace(run=run)

    return one_launch.Caught(kernel.name, kernel.source, "cuda", interpreted)


def stepped(kind: dict[str, Any], together: bool) -> tuple[list[Tensor], tuple[list[int], list[tuple[int, ...]]]]:
    """All tensors of three steps, and their launches. In the second step some parameters have no gradient, in the third some
    have one of another layout."""
    options = {name: value for name, value in kind.items() if name not in ("dtype", "optimizer")}
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Tensor:
        made = torch.randn(shape, generator=generator).to(kind.get("dtype", torch.float32))
        return made.to(memory_format=torch.channels_last) if made.dim() == 4 else made

    made = kind.get("optimizer", "AdamW")
    parameters = [nn.Parameter(drawn(shape)) for shape in SHAPES if len(shape) == 2 or made != "Muon"]
    named = [(f"w{i}", p) for i, p in enumerate(parameters)]
    optimizer = getattr(optim, made)(named, lr=1e-2, **options)
    with as_on_a_gpu(together=together) as launches:
        for step in range(3):
            for i, p in enumerate(parameters):
                g = drawn(tuple(p.shape))
                if step == 2:
                    g = g.t().contiguous().t() if g.dim() == 2 else g.contiguous()
                p.grad = g if step != 1 or i % 3 else None
            versions = [p._version for p in parameters]
            optimizer.step()
            changed = [p._version > before for p, before in zip(parameters, versions, strict=True)]
            assert changed == [p.grad is not None for p in parameters], "codes of weights are kept by these numbers"
    states = [t for p in parameters for t in optimizer.state[p].values()]
    return [*(p.detach() for p in parameters), *states], launches


def interpreted(kind: str) -> dict[str, Any]:
    ours, (blocks, alone) = stepped(KINDS[kind], together=True)
    singly, (none, _) = stepped(KINDS[kind], together=False)
    differ = sum(
        not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(map(_flat, ours), map(_flat, singly), strict=True)
    )
    launches = {"launches": len(blocks), "blocks": blocks, "alone": alone, "singly": len(none)}
    return {"tensors": len(ours), "differ": differ, **launches}


def _flat(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1)


def report(names: Sequence[str]) -> dict[str, Any]:
    fake_h100.install()
    if not interpreter.interpreting():
        return {name: assembled(name) for name in names}
    interpreter.install()
    return {name: interpreted(name) for name in names}


if __name__ == "__main__":
    print_json(lambda: report(sys.argv[1:] or (KINDS if interpreter.interpreting() else CASES)))
