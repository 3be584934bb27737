"""Whether a weight is still what it was: by its version counter and its address, by its optimizer, and by a look at it.

Operations on a weight under ``torch.no_grad()`` count its version: those of optimizers, load_state_dict, averaging. Fused
optimizers do not (torch 2.11 to 2.15), but an optimizer's step is noticed. What is done to ``weight.data`` is not.
Three things stand against that:

    trust       a weight that is trained is taken for unchanged only once a change of it was noticed: a loop that updates
                ``p.data`` never gets there, and has its weights encoded in each call
    a look      where codes are used again, SAMPLES elements of each weight are compared with what they were
    the user    may say so (``scaling_state(model).forget_weights()``)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SAMPLES = 256


class WeightVersion:
    """One weight as it was when it was last encoded. It holds no memory of the weight's.

    Attributes:
        noticed: whether a change of it was noticed, by its version or by an optimizer.
        distrusted: whether it changed unseen once.
    """

    def __init__(self) -> None:
        self.noticed = self.distrusted = False
        self._version, self._address = -1, 0
        self.sample = torch.empty(0)

    def is_the_same(self, weight: Tensor) -> bool:
        """Whether no change was noticed."""
        return (self._version, self._address) == (weight._version, weight.data_ptr())

    def is_as_it_was(self, weight: Tensor) -> bool:
        """Whether no change was noticed, and changes of it are noticed."""
        return self.is_the_same(weight) and not self.distrusted and (self.noticed or not weight.requires_grad)

    def stepped(self) -> None:
        """An optimizer has taken a step with it."""
        self.noticed, self._version = True, -1

    def look(self, weight: Tensor) -> None:
        """Take note of the weight as it is now."""
        self.noticed |= self._version not in (-1, weight._version)
        self._version, self._address = weight._version, weight.data_ptr()
        self.sample = sample_of(weight).clone()


def sample_of(weight: Tensor) -> Tensor:
    """Some elements of a weight, in its memory: SAMPLES or a few less."""
    flat = weight.data.view(-1)
    return flat[:: -(-flat.numel() // SAMPLES) | 1]  # odd: an even step may stay in one column


def differ(watched: Iterable[tuple[WeightVersion, Tensor]]) -> Tensor:
    """0-d bool: whether a sample of one of these weights is not what it was, bit by bit."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for each, weight in watched:
        groups[weight.device, weight.dtype].append((sample_of(weight), each.sample))
    answers = [_any_differs(*zip(*pairs, strict=True)) for pairs in groups.values()]
    return torch.stack([answer.to(answers[0].device) for answer in answers]).any()


def _any_differs(now: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    bits = [torch.cat(tuple(each)).float().view(torch.int32) for each in (now, before)]
    return (bits[0] != bits[1]).any()
