"""The modes of torch.distributed, each as a user writes it: what to wrap, what to compile, in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fp8compile
from fp8compile.reporting.entries import LINEAR
from tests.support.parallel import Setup, Trained, alone, differing, loss_of, on_rank
from tests.support.parallel_pipeline import in_one_process, pipeline
from tests.support.ranks import on_ranks


@dataclass(frozen=True)
class Mode:
    """One line of the table.

    Attributes:
        run: the mode itself, a function of a module that each rank calls with ``setup``.
        setup: of the ranks and of the single process.
        world: how many ranks.
        shards: among how many the rows are divided; ranks of one tensor parallel group have the same rows.
        stages: whether each rank has a stage of the model.
    """

    run: Callable[[Setup], Trained]
    setup: Setup = field(default_factory=Setup)
    world: int = 2
    shards: int = 2
    stages: bool = False


def ddp_compiled_around(setup: Setup, **options: Any) -> Trained:
    """``torch.compile(DistributedDataParallel(model))``: Dynamo cuts the graph where DDP's buckets end."""
    model = setup.net()
    wrapped = setup.compiled(DistributedDataParallel(model, **options))
    return on_rank(setup, model, wrapped, wrapped, dist.get_rank(), _sync(wrapped))


def ddp_around_compiled(setup: Setup, **options: Any) -> Trained:
    """``DistributedDataParallel(compiled)``."""
    model = setup.compiled(setup.net())
    wrapped = DistributedDataParallel(model, **options)
    return on_rank(setup, model, wrapped, wrapped, dist.get_rank(), _sync(wrapped))


def _sync(wrapped: nn.Module) -> Callable[[bool], Any]:
    return lambda last: contextlib.nullcontext() if last else wrapped.no_sync()  # type: ignore[operator]


def around_buckets(setup: Setup) -> Trained:
    return ddp_compiled_around(setup, bucket_cap_mb=1)


def within_buckets(setup: Setup) -> Trained:
    return ddp_around_compiled(setup, bucket_cap_mb=1)


def around_static(setup: Setup) -> Trained:
    return ddp_compiled_around(setup, static_graph=True)


def within_static(setup: Setup) -> Trained:
    return ddp_around_compiled(setup, static_graph=True)


def fsdp(setup: Setup) -> Trained:
    """Compile, then ``fully_shard``: each block and the rest, or the whole model at once."""
    model = setup.compiled(setup.net())
    options: dict[str, Any] = {"mesh": _mesh()}
    if setup.cast:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=setup.cast)
    for each in [*model.blocks, model] if setup.blocks else [model]:  # type: ignore[misc]
        fully_shard(each, **options)
    return on_rank(setup, model, model, model, dist.get_rank())


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def cut_for_tensor_parallelism(model: nn.Module) -> None:
    """Every ``up`` by columns and every ``down`` by rows, over all ranks."""
    _colwise_rowwise(model, _mesh())


def tensor_parallel(setup: Setup) -> Trained:
    """``parallelize_module``, then compile."""
    model = setup.net()
    cut_for_tensor_parallelism(model)
    return on_rank(setup, model, setup.compiled(model), model, 0)


def _colwise_rowwise(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(setup: Setup) -> Trained:
    """Norms and residuals on a part of the sequence; linears on all of it, cut as in tensor parallelism."""
    model, mesh = setup.net(), _mesh()
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    cut = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True)
    parallelize_module(model, mesh, {"blocks.0": cut, "head": whole})
    return on_rank(setup, model, setup.compiled(model), model, 0)


def fsdp_and_tensor_parallel(setup: Setup) -> Trained:
    """Tensor parallelism within a block, ``fully_shard`` across; compiled by blocks."""
    model = setup.net()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    _colwise_rowwise(model, mesh["tp"])
    setup.compiled(model)
    for each in [*model.blocks, model]:
        fully_shard(each, mesh=mesh["dp"])
    return on_rank(setup, model, model, model, mesh["dp"].get_local_rank())


def gpipe(setup: Setup) -> Trained:
    return pipeline(setup, "GPipe")


def one_forward_one_backward(setup: Setup) -> Trained:
    return pipeline(setup, "1F1B")


# Where torch cuts the graph elsewhere than the single process does, other tensors are saved, and so other codes. Then what is
# saved stays exact, and linears alone are compared.
NO_CODES: dict[str, Any] = {"saved": "off"}
# States of what is cut along dimension 1 stay FP32 (fp8compile/_distributed.py), so the single process keeps them so too.
CUT: dict[str, Any] = {"options": NO_CODES, "block": {"pieces": 2}, "overrides": {"*down.weight": "fp32"}}
IN_SEQUENCE = {**CUT, "block": {"pieces": 2, "sequence": True}}
FP16 = Setup(dtype=torch.float16)
WIDE = Setup(width=256, options=NO_CODES)
BLOCKS = Setup(blocks=True)

MODES: dict[str, Mode] = {
    "DDP, compiled around": Mode(ddp_compiled_around),
    "DDP, compiled around, several buckets": Mode(around_buckets, WIDE),
    "DDP, compiled around, no_sync": Mode(ddp_compiled_around, Setup(micro=2)),
    "DDP, compiled around, static_graph": Mode(around_static),
    "DDP, compiled around, FP16": Mode(ddp_compiled_around, FP16),
    "DDP, compiled within": Mode(ddp_around_compiled),
    "DDP, compiled within, several buckets": Mode(within_buckets, WIDE),
    "DDP, compiled within, no_sync": Mode(ddp_around_compiled, Setup(micro=2)),
    "DDP, compiled within, static_graph": Mode(within_static),
    "DDP, compiled within, FP16": Mode(ddp_around_compiled, FP16),
    "FSDP2, whole": Mode(fsdp),
    "FSDP2, whole, BF16": Mode(fsdp, Setup(cast=torch.bfloat16)),
    "FSDP2, per block": Mode(fsdp, BLOCKS),
    "FSDP2, per block, BF16": Mode(fsdp, replace(BLOCKS, cast=torch.bfloat16)),
    "FSDP2, per block, FP16": Mode(fsdp, replace(BLOCKS, dtype=torch.float16)),
    "TP": Mode(tensor_parallel, Setup(**CUT), shards=1),
    # Rounded stochastically, a part that is cut along dimension 1 has other random bits than those columns of the whole.
    "TP, FP16": Mode(tensor_parallel, Setup(dtype=torch.float16, master="fp32", **CUT), shards=1),
    "sequence parallel": Mode(sequence_parallel, Setup(**IN_SEQUENCE), shards=1),
    "FSDP2 + TP": Mode(fsdp_and_tensor_parallel, Setup(blocks=True, **CUT), world=4),
    "pipeline, GPipe": Mode(gpipe, stages=True),
    "pipeline, 1F1B": Mode(one_forward_one_backward, stages=True),
    "pipeline, 1F1B, FP16": Mode(one_forward_one_backward, FP16, stages=True),
}


@dataclass(frozen=True)
class Comparison:
    """What ranks have beside the single process.

    Attributes:
        losses: of each rank, step by step, are those of the single process, bit for bit.
        parameters: names of those that are not, on any rank.
        states: parameter and key of the optimizer's states that are not.
        linears: matmuls in FP8 on the ranks, together.
        of: matmuls that the model has.
        as_alone: whether the same are in FP8 in the model compiled on one process, and the same left, for the same reasons.
        replicas: whether all ranks hold the same parameters; None in a pipeline.
        scales: whether all ranks had the same loss scale in every step, and that of the single process; None but in FP16.
        counts: whether all ranks saw the same sums of gradients; None but in FP16.
        counts_alone: whether these sums are the single process's.
        saved_bytes: of the largest rank's graphs.
    """

    losses: bool
    parameters: tuple[str, ...]
    states: tuple[str, ...]
    linears: int
    of: int
    as_alone: bool
    replicas: bool | None
    scales: bool | None
    counts: bool | None
    counts_alone: bool | None
    saved_bytes: int


def compared(name: str) -> Comparison:
    """Run a mode on its ranks, and the single process here."""
    mode = MODES[name]
    torch._dynamo.reset()
    wanted = in_one_process(mode.setup) if mode.stages else [alone(mode.setup, mode.shards)]
    found: list[Trained] = on_ranks(mode.world, mode.run, mode.setup)
    beside = [wanted[rank if mode.stages else 0] for rank in range(mode.world)]
    pairs = list(zip(found, beside, strict=True))
    linears, left = (sorted({each for f in found for each in getattr(f, key)}) for key in ("linears", "left"))
    fp16 = mode.setup.dtype == torch.float16
    return Comparison(
        all(_same_losses(mode, rank, f, w) for rank, (f, w) in enumerate(pairs)),
        tuple(sorted({n for f, w in pairs for n in differing(f.parameters, w.parameters)})),
        tuple(sorted({n for f, w in pairs for n in differing(f.states, w.states)})),
        len(linears),
        len(linears) + len(left),
        (linears, left) == _in_fp8(mode.setup),
        None if mode.stages else all(not differing(f.parameters, found[0].parameters) for f in found),
        all(f.scales == beside[0].scales for f in found) if fp16 else None,
        all(f.counts == found[0].counts for f in found) if fp16 else None,
        all(f.counts == beside[0].counts for f in found) if fp16 else None,
        max(f.saved_bytes for f in found),
    )


def _same_losses(mode: Mode, rank: int, found: Trained, wanted: Trained) -> bool:
    if mode.stages:  # the last stage knows them
        return rank == 0 or found.losses == wanted.losses
    return bool(found.losses == wanted.losses[rank * mode.shards // mode.world])


def _in_fp8(setup: Setup) -> tuple[list[tuple[str, str]], list[tuple[str, str, str]]]:
    """The matmuls of the whole model, compiled by one process as users do, in FP8 and left."""
    torch._dynamo.reset()
    model = setup.compiled(replace(setup, cast=None).net())
    x, labels = replace(setup, cast=None).batch(0, 0)
    loss_of(model(x), labels).backward()
    report = fp8compile.report(model)
    left = {(e.origin.module, e.direction, e.reason) for e in report.skips if e.kind == LINEAR}
    return sorted({(e.origin.module, e.direction) for e in report.linears}), sorted(left)
