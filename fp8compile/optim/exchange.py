"""Where those that need codes of weights ask for them, and optimizers leave what their steps have written.

    graphs  ->  ask(weight, Wanted)  ->  the optimizer's step  ->  leave(weight, WrittenWeight)  ->  graphs

What was written is of the weight as the step left it: ``of`` gives it while version and address of the weight say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8compile.optim.step_codes import Wanted


@dataclass(frozen=True)
class WrittenWeight:
    """What is known of a weight since the step that made it.

    Attributes:
        inv_scale: ``[1, 1]``, FP32.
        known: ``[2]``, FP32: its largest magnitude, and the largest ``reach`` of its states.
        clipped: 0-d bool, whether the codes have clipped a value; it takes a change that no version counts.
        wanted: what was asked for; None where scales alone are known, from a checkpoint.
        by_rows, transposed: codes ``[N, K]`` and ``[K, N]``.
        seen: version and address of the weight.
        optimizer: the ``id`` of who wrote it.
    """

    inv_scale: Tensor
    known: Tensor
    seen: tuple[int, int]
    clipped: Tensor | None = None
    wanted: Wanted | None = None
    by_rows: Tensor | None = None
    transposed: Tensor | None = None
    optimizer: int = 0


def seen(weight: Tensor) -> tuple[int, int]:
    """What changes with each change of a weight that is counted."""
    return weight._version, weight.data_ptr()


class Exchange:
    """What is asked for and what was written, for all weights that are alive."""

    def __init__(self) -> None:
        self._asked: MutableMapping[Tensor, tuple[Wanted, Callable[[], None]]] = WeakTensorKeyDictionary()
        self._written: MutableMapping[Tensor, WrittenWeight] = WeakTensorKeyDictionary()

    def ask(self, weight: Tensor, wanted: Wanted, give_up: Callable[[], None]) -> None:
        """Have the next step of an optimizer that can write these codes; ``give_up`` frees those there are."""
        self._asked[weight] = wanted, give_up

    def asked(self, weight: Tensor) -> Wanted | None:
        found = self._asked.get(weight)
        return None if found is None else found[0]

    def give_up(self, weight: Tensor) -> None:
        """New codes are about to be written: the old ones' memory may be used."""
        self._written.pop(weight, None)
        self._asked[weight][1]()

    def leave(self, weight: Tensor, written: WrittenWeight) -> None:
        self._written[weight] = written

    def of(self, weight: Tensor) -> WrittenWeight | None:
        """What is known of the weight as it is."""
        found = self._written.get(weight)
        return found if found is not None and found.seen == seen(weight) else None

    def codes_of(self, weight: Tensor) -> tuple[Tensor | None, ...]:
        """The codes that a step has written of the weight, by rows and transposed, and their inv_scale."""
        found = self._written.get(weight)
        return () if found is None else (found.by_rows, found.transposed, found.inv_scale)

    def stepped(self, weight: Tensor, optimizer: int) -> None:
        """An optimizer has updated the weight: what another one has written is out of date, counted or not."""
        found = self._written.get(weight)
        if found is not None and found.optimizer != optimizer:
            del self._written[weight]

    def forget(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._asked.pop(weight, None)
            self._written.pop(weight, None)


exchange = Exchange()
