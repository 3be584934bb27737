"""Codes of weights, made once and used until the weight changes (``Recipe.linears.cache_weights``).

They are tensorwise under the weight's own amax, as a graph with dynamic scaling makes them, bit by bit. (Under autocast a
generated kernel may leave out the rounding to 16 bits on the way, which is not left out here.) New codes are new tensors: a
backward that is still to come keeps those of its forward. A whole step alone (fp8compile/whole_step) writes over them; such a
backward then raises.

Where the optimizer's step has written them (``fp8compile.optim``, ``weight_codes=True``), they are taken as they are, under
the scale that the step predicted.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8compile import _torch as private
from fp8compile.fx.graph import dtype_text
from fp8compile.linears.packed_weights import Codes, Packs
from fp8compile.linears.sent import PendingBool
from fp8compile.linears.weight_changes import WeightVersion, differ
from fp8compile.numerics import E4M3, ENCODABLE, Tensorwise
from fp8compile.numerics.delayed import quantize_under
from fp8compile.numerics.scaling import amax_tensorwise
from fp8compile.optim.exchange import exchange
from fp8compile.optim.step_codes import Wanted
from fp8compile.reporting.entries import CachedWeight

BY_NAME = {dtype_text(torch.empty(0, dtype=dtype)): dtype for dtype in ENCODABLE}
UNSEEN = (
    "a weight of an FP8 linear was changed in a way that no version counter sees, as changing `.data` is. Where the model "
    "runs on a GPU, the call before this one may have used its old codes. From here on such weights are encoded in each "
    "call. Change weights under torch.no_grad(), not through .data; or call "
    "fp8compile.tools.scaling_state(model).forget_weights() behind each change; or set Recipe.linears.cache_weights to False."
)


@dataclass(frozen=True)
class Layouts(Wanted):
    """What graphs take of a weight, joined over graphs."""

    @classmethod
    def of(cls, entry: CachedWeight) -> Layouts:
        return cls(BY_NAME[entry.dtype], entry.by_rows, entry.transposed)

    def __or__(self, other: Layouts) -> Layouts:
        return Layouts(self.dtype, self.by_rows or other.by_rows, self.transposed or other.transposed)


def encode(weight: Tensor, layouts: Layouts, under: Tensor | None = None) -> tuple[Tensor, ...]:
    """The inv_scale ``[1, 1]`` of a weight ``[N, K]``, then its codes in the layouts that are taken.

    ``under``: the inv_scale that its codes had when a checkpoint was saved; taken if it clips nothing.
    """
    codes, inv_scale = _known_or_own(weight.to(layouts.dtype), under)
    transposed = codes.view(torch.uint8).t().contiguous().view(codes.dtype)
    return (
        inv_scale.reshape(1, 1),
        *([codes] if layouts.by_rows else []),
        *([transposed] if layouts.transposed else []),
    )


def _known_or_own(weight: Tensor, under: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, inv_scale = Tensorwise(E4M3).encode(weight)
    if under is None:
        return codes, inv_scale
    fits = amax_tensorwise(weight) <= E4M3.max * under.reshape(())
    return torch.where(fits, quantize_under(weight, under, E4M3).view(torch.uint8), codes.view(torch.uint8)).view(
        codes.dtype
    ), torch.where(fits, under.reshape(()), inv_scale)


class KeptCodes:
    """The codes of one weight in one dtype."""

    def __init__(self, layouts: Layouts) -> None:
        self.layouts, self.watched = layouts, WeightVersion()
        self.made: Codes | None = None

    @property
    def codes(self) -> Codes:
        """By rows, transposed, inv_scale; once they are made."""
        assert self.made is not None
        return self.made

    def serves(self, weight: Tensor, layouts: Layouts) -> bool:
        """Whether its codes are those of the weight as it is, in these layouts."""
        return self.made is not None and self.layouts | layouts == self.layouts and self.watched.is_as_it_was(weight)

    def make(self, weight: Tensor, layouts: Layouts, generated: bool) -> None:
        """Encode the weight as it is, in these layouts and those that it had."""
        self.layouts |= layouts
        inv_scale, *codes = self._encoded(weight, generated)
        rest = iter(codes)
        by_rows, transposed = (
            next(rest) if each else None for each in (self.layouts.by_rows, self.layouts.transposed)
        )
        self.made = by_rows, transposed, inv_scale
        self.watched.look(weight)
        if not self.watched.distrusted:
            exchange.ask(weight, self.layouts, self.give_up)

    def _encoded(self, weight: Tensor, generated: bool) -> tuple[Tensor, ...]:
        known = exchange.of(weight)
        if known is None or known.clipped is not None:
            return encoder(weight, self.layouts, generated)(weight.detach())
        with torch.no_grad():
            return encode(weight.detach(), self.layouts, known.inv_scale)

    def take_over(self, weight: Tensor, layouts: Layouts) -> Tensor | None:
        """Take what a step has written of the weight as it is, in these layouts; whether it has clipped a value, 0-d."""
        found, joined = exchange.of(weight), self.layouts | layouts
        if found is None or found.wanted != joined or self.watched.distrusted:
            return None
        self.layouts = joined
        self.made = found.by_rows, found.transposed, found.inv_scale
        self.watched.look(weight)
        return found.clipped

    def give_up(self) -> None:
        """Free the codes: there will be new ones."""
        self.made = None


class Store:
    """The codes of all weights that are alive."""

    def __init__(self) -> None:
        self._kept: MutableMapping[Tensor, dict[torch.dtype, KeptCodes]] = WeakTensorKeyDictionary()
        self._asked: list[tuple[PendingBool, list[WeightVersion]]] = []
        self._hook: Any = None
        self.packs = Packs()

    def up_to_date(self, weights: Sequence[tuple[Tensor, Layouts]], generated: bool) -> list[Codes]:
        """The codes of these weights as they are; ``generated``: by kernels of Inductor's where the device is a GPU."""
        self._hook = self._hook or register_optimizer_step_post_hook(self._stepped)
        kept = [self._kept.setdefault(weight, {}).setdefault(each.dtype, KeptCodes(each)) for weight, each in weights]
        again = [
            (one.watched, weight)
            for one, (weight, each) in zip(kept, weights, strict=True)
            if one.serves(weight, each)
        ]
        if again:
            self._asked.append((PendingBool(differ(again)), [watched for watched, _ in again]))
        self._take_over([(one, *each) for one, each in zip(kept, weights, strict=True) if not one.serves(*each)])
        self._take_answers()
        for one, (weight, each) in zip(kept, weights, strict=True):
            if not one.serves(weight, each):
                one.make(weight, each, generated)
                self._drop_others(weight, one)
        return [one.codes for one in kept]

    def _take_over(self, missing: Sequence[tuple[KeptCodes, Tensor, Layouts]]) -> None:
        """Take what steps have written, and ask whether they clipped: only after a change that was not counted can they."""
        answers = [(one.watched, one.take_over(weight, layouts)) for one, weight, layouts in missing]
        clipped = [(watched, found) for watched, found in answers if found is not None]
        if clipped:
            first = clipped[0][1].device
            any_clipped = torch.stack([found.to(first) for _, found in clipped]).any()
            self._asked.append((PendingBool(any_clipped), [watched for watched, _ in clipped]))

    def _drop_others(self, weight: Tensor, made: KeptCodes) -> None:
        """Of a weight's codes in other dtypes keep those that are up to date."""
        found = self._kept[weight].items()
        self._kept[weight] = {d: one for d, one in found if one is made or one.watched.is_the_same(weight)}

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Each optimizer calls this behind its step, so that a change is known that no version counts (fused optimizers)."""
        if torch.compiler.is_compiling():
            return
        for weight in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
            exchange.stepped(weight, id(optimizer))
            for one in self._kept.get(weight, {}).values():
                one.watched.stepped()

    def _take_answers(self) -> None:
        """Distrust weights that turn out to have changed unseen; wait for no answer."""
        for answer in [asked for asked in self._asked if asked[0].arrived]:
            self._asked.remove(answer)
            changed, watched = answer
            if changed:
                for each in watched:
                    each.distrusted = True
                warnings.warn(UNSEEN, stacklevel=2)

    def forget(self, weights: Iterable[Tensor]) -> None:
        """Encode these weights anew at the next call."""
        weights = list(weights)
        self.packs.forget(weights)
        exchange.forget(weights)
        for weight in weights:
            self._kept.pop(weight, None)

    def bytes_of(self, weights: Iterable[Tensor]) -> int:
        """Bytes that the codes of these weights hold."""
        weights = list(weights)
        made = [one.made for weight in weights for one in self._kept.get(weight, {}).values() if one.made]
        written = [exchange.codes_of(weight) for weight in weights]  # by a step, and perhaps taken over
        held = {id(codes): codes.nbytes for each in (*made, *written) for codes in each if codes is not None}
        return sum(held.values()) + self.packs.bytes_of(weights)


store = Store()


def encoder(weight: Tensor, layouts: Layouts, generated: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """What encodes weights of this shape: operation by operation, or in kernels of Inductor's."""
    if not (generated and weight.is_cuda):
        return functools.partial(_without_gradient, layouts)
    return _generated(tuple(weight.shape), weight.dtype, weight.device, layouts)


def _without_gradient(layouts: Layouts, weight: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return encode(weight, layouts)


@functools.cache
def _generated(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layouts: Layouts
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    example = torch.empty(shape, dtype=dtype, device=device)
    graph = private.make_fx(functools.partial(_without_gradient, layouts), tracing_mode="fake")(example)
    compiled: Any = private.compile_fx(graph, [example])
    return cast(Callable[[Tensor], tuple[Tensor, ...]], compiled)
