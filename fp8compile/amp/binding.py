"""Which statistics belong to which scaler.

    one scaler        all observations of its optimizers' parameters, and of the compiled graphs behind its losses
    several (a GAN)   of these observations, what is added between ``scale`` of one scaler and ``scale`` of the next belongs
                      to the first: the generator's loss goes through the discriminator's graph too, at its own scale

So each scaler's histogram holds the gradients that were scaled by it. Two losses that share a model cannot be told apart if
two scalers scale them before either backward has run. Run the backward of each loss before the next one is scaled.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fp8compile.amp.autograd_graph import leaves_behind
from fp8compile.numerics import histogram
from fp8compile.observe.records import Observations, StatsSlot, alive

_bindings: list[weakref.ref[Binding]] = []  # of every scaler that has bound anything
_active: weakref.ref[Binding] | None = None  # the one whose loss was scaled last


class Binding:
    """The observations of one scaler, held by weak references.

    Args:
        saturates: whether FP16 gradients are clipped in the backward of what it is bound to.
    """

    def __init__(self, saturates: bool) -> None:
        self.saturates = saturates
        self._bound: list[weakref.ref[Observations]] = []
        self._behind: list[weakref.ref[Observations]] = []  # losses scaled since the last update
        self._taken: weakref.WeakKeyDictionary[Observations, tuple[Tensor, int]] = weakref.WeakKeyDictionary()
        self._registered = False
        weakref.finalize(self, _release, self._bound)

    @property
    def observations(self) -> list[Observations]:
        """The bound observations that are still alive, oldest first."""
        return [each for ref in self._bound if (each := ref()) is not None]

    def by_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Bind the observations of these parameters. They belong to this scaler's optimizer: other scalers lose them."""
        known = self.observations
        unknown = [each for each in alive() if each not in known]
        wanted = {id(p) for p in parameters} if unknown else set()
        for each in unknown:
            if _ids(each) & wanted:
                for other in _others(self):  # which had bound it by one of its losses
                    other._bound[:] = [ref for ref in other._bound if ref() is not each]
                self._bind(each)

    def by_losses(self, losses: Sequence[Tensor]) -> None:
        """Bind the observations behind these losses that no scaler has. What is seen from here on belongs to this scaler."""
        global _active
        before = _active() if _active is not None else None
        if before is not None and before is not self:
            before.take()
        _active = weakref.ref(self)
        everyones = {id(each) for other in _others(self) for each in other.observations}
        known = {id(each) for each in self.observations}
        if not everyones and all(id(each) in known for each in alive()):
            return  # the common case: no need to walk
        leaves = leaves_behind(losses)
        for each in alive():
            if _ids(each) & leaves:
                if id(each) not in everyones:
                    self._bind(each)
                if all(ref() is not each for ref in self._behind):
                    self._behind.append(weakref.ref(each))

    def _bind(self, each: Observations) -> None:
        if not self._registered:
            _bindings.append(weakref.ref(self, _bindings.remove))
            self._registered = True
        if each not in self.observations:
            self._bound.append(weakref.ref(each))
            each.saturate(self.saturates)

    def _mine(self) -> list[Observations]:
        """The observations that this scaler's backward adds to."""
        behind = [each for ref in self._behind if (each := ref()) is not None]
        return list(dict.fromkeys([*self.observations, *behind]))

    def take(self) -> None:
        """Set aside what was seen until now, before another scaler's loss is propagated."""
        self._take(self._mine())

    def _take(self, several: Iterable[Observations]) -> None:
        for each in several:
            seen, additions = each.current, each.additions
            if each in self._taken:
                before, earlier = self._taken[each]
                seen, additions = histogram.fold(_padded(before, seen), seen), additions + earlier
            self._taken[each] = seen, additions
            each.current, each.additions = torch.zeros_like(each.current), 0

    def adding(self) -> list[Observations]:
        """The observations that have seen a backward since the last update."""
        own = ((each, self._taken.get(each)) for each in self._mine())
        return [each for each, taken in own if each.additions or (taken is not None and taken[1])]

    def close(self, step: int) -> list[tuple[Observations, Tensor]]:
        """End a step; returns what was seen for each of this scaler's observations, ``[rows, 7]``."""
        active = _active() if _active is not None else None
        theirs = set() if active is None or active is self else set(map(id, active._mine()))
        mine = self._mine()
        self._take(each for each in mine if id(each) not in theirs)
        self._behind.clear()
        return [self._close(each, step) for each in mine if each in self._taken]

    def _close(self, each: Observations, step: int) -> tuple[Observations, Tensor]:
        others, additions = each.current, each.additions  # seen since, in the backward of another scaler's loss
        seen, _ = self._taken.pop(each)
        each.current = _padded(seen, others)
        seen = each.close(step)
        each.current, each.additions = others, additions
        return each, seen


def _ids(each: Observations) -> set[int]:
    """The leaves by which an observation is known: its parameters, and its slot's values."""
    own = {id(p) for ref in each.parameters if (p := ref()) is not None}
    return own | {id(each.values)} if isinstance(each, StatsSlot) else own


def _release(bound: list[weakref.ref[Observations]]) -> None:
    """The scaler is gone: no scaler owns these observations any more."""
    for each in [each for ref in bound if (each := ref()) is not None]:
        each.saturate(False)
        each.scaled = False


def _others(binding: Binding) -> list[Binding]:
    return [each for ref in list(_bindings) if (each := ref()) is not None and each is not binding]


def _padded(seen: Tensor, like: Tensor) -> Tensor:
    """``seen`` with rows of 0 for those that were added since."""
    return torch.cat([seen, torch.zeros_like(like[len(seen) :])]) if len(seen) < len(like) else seen
