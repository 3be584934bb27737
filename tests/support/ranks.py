"""Functions run on several ranks at once: a process each, forked from one that has imported everything, joined by gloo."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

PATIENCE = timedelta(seconds=120)  # what a rank waits for the others


@contextlib.contextmanager
def one_of_two() -> Iterator[None]:
    """This process is one of two ranks whose messages go nowhere: enough to compile."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch._dynamo.reset()
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def on_ranks(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``fn(*args)`` returns on each of ``world`` ranks; ``fn`` is a function of a module.

    Raises:
        AssertionError: it raised on some ranks; the text is the traceback of each that had failed by then. The first to fail
            is among them: others fail since they wait for it, once its process ends.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp8compile", "tests.support.warm", fn.__module__])
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(fn, args, rank, world, str(Path(folder) / "store"), ends[rank][1]))
            for rank in range(world)
        ]
        for each in ranks:
            each.start()
        for _, sending in ends:
            sending.close()  # so that a process that dies is seen to
        try:
            return results_of([receiving for receiving, _ in ends])
        finally:
            for each in ranks:
                each.kill()  # has sent its result, or waits for one that failed
                each.join()


def results_of(pipes: list[Connection]) -> list[Any]:
    found: dict[Connection, Any] = {}
    while len(found) < len(pipes):
        failures = []
        for pipe in wait([pipe for pipe in pipes if pipe not in found]):
            try:
                failed, found[pipe] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                failed, found[pipe] = True, "the process died"  # type: ignore[index]
            if failed:
                failures.append(f"rank {pipes.index(pipe)}: {found[pipe]}")  # type: ignore[arg-type, index]
        assert not failures, "\n".join(failures)
    return [found[pipe] for pipe in pipes]


def _rank(fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=PATIENCE)
        pipe.send((False, fn(*args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((True, traceback.format_exc()))
