"""Gradients of many micro-batches as their running mean, over micro-batches and ranks (numerics/running_mean.py).

    backward of a micro-batch  ->  M <- (k - 1) / k * M + p.grad / k,  p.grad dropped       by a hook, parameter by parameter
    finish()                   ->  p.grad <- sum_r k_r M_r / sum_r N_r                      N_r: micro-batches of rank r

So the loss of a micro-batch is its own mean, not divided by their number, and the loss scale does not depend on that number.
A parameter that some micro-batches do not use (k < N) gets a gradient of 0 from them. Ranks may have seen different numbers
of micro-batches: each micro-batch has the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8compile._distributed import complete_grad, first_element, local_part, shard_like
from fp8compile.numerics.running_mean import fold_mean, rounded_mean

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 2**24  # elements that are reduced together: 64 MiB
FINISHES = 2**31  # the random numbers of finish() start here; no fold reaches this number


class Accumulation:
    """Gradients being folded into means; made by ``accumulate``. A context manager, which calls ``remove()`` at its end."""

    def __init__(
        self,
        parameters: list[Tensor],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        seed: int,
        ddp: DistributedDataParallel | None,
    ) -> None:
        self.parameters, self.dtype, self.group, self.seed, self.ddp = parameters, dtype, group, seed, ddp
        self._means: list[Tensor | None] = [None] * len(parameters)
        self._counts = [0] * len(parameters)
        self._roundings = self._finishes = 0
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(parameters)
        ]

    def __enter__(self) -> Accumulation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off: gradients are summed again, as usual. What was not finished is lost."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._start_anew()

    @property
    def micro_batches(self) -> int:
        """Micro-batches since the last ``finish``, on this rank."""
        return max(self._counts, default=0)

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        def fold(p: Tensor) -> None:
            if self.ddp is not None and self.ddp.require_backward_grad_sync:
                raise RuntimeError(
                    "DistributedDataParallel averages over ranks itself: run forward and backward under model.no_sync(), "
                    "for finish() to do it once"
                )
            self._fold(i, p)

        return fold

    @torch.no_grad()
    def _fold(self, i: int, p: Tensor) -> None:
        if p.grad is None:
            return
        if p.grad.layout != torch.strided:
            raise ValueError(f"parameter {i} of shape {[*p.shape]} has a sparse gradient, of which no mean is kept: build "
                             "the embedding with sparse=False")  # fmt: skip
        complete_grad(p)
        gradient, p.grad = local_part(p.grad), None
        self._counts[i] += 1
        mean = self._means[i]
        mean = fold_mean(torch.zeros_like(gradient) if mean is None else mean, gradient, self._counts[i])
        self._roundings += 1
        stream = i + self._rank() * len(self.parameters)  # ranks must not share their rounding errors
        self._means[i] = self._rounded(i, mean, self.dtype, stream, self._roundings)

    def _rounded(self, i: int, mean: Tensor, dtype: torch.dtype, stream: int, step: int) -> Tensor:
        first = first_element(self.parameters[i])
        return rounded_mean(mean, dtype, seed=self.seed, stream=stream, step=step, first=first)

    @torch.no_grad()
    def finish(self, micro_batches: int | None = None) -> None:
        """Put the means into ``p.grad``, in p's dtype, and start anew. Every rank calls it.

        Args:
            micro_batches: how many this rank has run; by default the largest number of gradients that any parameter got.
                Give it where a micro-batch runs several backwards, or where no parameter is used by all micro-batches.

        Raises:
            RuntimeError: no micro-batch on any rank.
            ValueError: ``micro_batches`` is not positive.
        """
        if micro_batches is not None and micro_batches < 1:
            raise ValueError(f"micro_batches={micro_batches}: 1 or more")
        own = self.micro_batches if micro_batches is None else micro_batches
        counts, total = self._agreed(own)
        if not any(counts):
            raise RuntimeError(
                "finish() without a backward since the last one: there is no gradient to take the mean of"
            )
        weighed = {
            i: self._weighed(i, total if self._is_whole(i) else own) for i, count in enumerate(counts) if count
        }
        self._reduce([mean for i, mean in weighed.items() if self._is_whole(i)])
        for i, mean in weighed.items():
            self._put(i, mean)
        self._finishes += 1
        self._start_anew()

    def _is_whole(self, i: int) -> bool:
        """Whether each rank has its own gradient of the whole parameter; fully_shard has averaged the gradients of shards."""
        return not isinstance(self.parameters[i], DTensor)

    def _agreed(self, own: int) -> tuple[list[int], int]:
        """How many gradients each parameter has on all ranks together, and how many micro-batches there were."""
        if not self._distributed():
            return self._counts, own
        numbers = torch.tensor([*self._counts, own], dtype=torch.int64, device=self.parameters[0].device)
        dist.all_reduce(numbers, group=self.group)
        *counts, total = map(int, numbers.tolist())
        return counts, total

    def _rank(self) -> int:
        return dist.get_rank() if self._distributed() else 0

    def _distributed(self) -> bool:
        return dist.is_available() and dist.is_initialized()

    def _weighed(self, i: int, total: int) -> Tensor:
        """This rank's part of the mean, float32."""
        mean = self._means[i]
        if mean is None:
            return torch.zeros_like(local_part(self.parameters[i]), dtype=torch.float32)
        return mean.float() if self._counts[i] == total else mean.float() * (self._counts[i] / total)

    def _reduce(self, means: list[Tensor]) -> None:
        """Sum over ranks, in place, several at once. The weights of all ranks add up to 1 at most: nothing overflows."""
        waiting = list(means) if self._distributed() else []
        while waiting:
            chunk = [waiting.pop(0)]
            while waiting and sum(m.numel() for m in chunk) + waiting[0].numel() <= CHUNK:
                chunk.append(waiting.pop(0))
            together = torch.cat([mean.flatten() for mean in chunk])
            dist.all_reduce(together, group=self.group)
            parts = torch.split(together, [m.numel() for m in chunk])
            for mean, part in zip(chunk, parts, strict=True):
                mean.copy_(part.view_as(mean))

    def _put(self, i: int, mean: Tensor) -> None:
        """Store a mean as the gradient, rounded as the accumulator is: stochastically if it has 16 bits, else to nearest."""
        p = self.parameters[i]
        stochastic = self.dtype != torch.float32 and p.dtype in (torch.float16, torch.bfloat16)
        # with the same random numbers on all ranks: their parameters must stay equal
        mean = self._rounded(i, mean, p.dtype, i, FINISHES + self._finishes) if stochastic else mean.to(p.dtype)
        p.grad = shard_like(p, mean) if isinstance(p, DTensor) else mean

    def _start_anew(self) -> None:
        self._means = [None] * len(self.parameters)
        self._counts = [0] * len(self.parameters)


def accumulate(
    model: nn.Module | Iterable[Tensor],
    dtype: torch.dtype = torch.float32,
    process_group: dist.ProcessGroup | None = None,
    seed: int = 0,
) -> Accumulation:
    """From now on, every backward folds its gradients into running means; ``finish()`` hands them out.

    Args:
        model: the model (DistributedDataParallel under ``no_sync()``; fully_shard averages over ranks itself), or parameters.
        dtype: the dtype of the means: float32, or float16 or bfloat16 with stochastic rounding.
        process_group: ranks over which ``finish`` takes the mean; None: all, where torch.distributed is initialised.
        seed: the seed of the stochastic rounding.

    Raises:
        ValueError: another dtype; no parameter that requires a gradient, or one that is not real floating-point.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype}: means are kept in torch.float32, torch.float16 or torch.bfloat16")
    several = model.parameters() if isinstance(model, nn.Module) else model
    parameters = [p for p in dict.fromkeys(several) if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter requires a gradient, so there is nothing to accumulate")
    for i, p in enumerate(parameters):
        if p.dtype not in DTYPES:
            raise ValueError(
                f"parameter {i} of shape {[*p.shape]} is {p.dtype}: float32, float16 and bfloat16 are kept"
            )
    ddp = model if isinstance(model, DistributedDataParallel) else None
    return Accumulation(parameters, dtype, process_group, seed, ddp)
