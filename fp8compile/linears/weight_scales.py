"""The scales of weights whose codes an optimizer's step writes (``weight_codes=True``): to look at and save.

    state  {parameter's name: [inv_scale, amax, reach]}, FP32

With them a resumed run goes on to the bit: its first call encodes the weights under the scales that they had, and its first
step predicts from what the last step before it had measured. Of a weight that has changed since, nothing is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8compile._messages import nearest
from fp8compile.optim.exchange import WrittenWeight, exchange, seen

PREDICTED, LOADED = "predicted by the step", "from a checkpoint"


def known(model: nn.Module) -> Iterator[tuple[str, WrittenWeight]]:
    """The weights of a model whose scales steps have predicted, and what is known of each."""
    for name, p in model.named_parameters():
        if (found := exchange.of(p)) is not None:
            yield name, found


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """What is saved."""
    return {name: torch.cat([w.inv_scale.reshape(1), w.known]).cpu() for name, w in known(model)}


def check(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raises ValueError for what ``load`` does not take; nothing is changed."""
    names = [name for name, _ in model.named_parameters()]
    for name, value in state.items():
        if name not in names:
            raise ValueError(
                f"the state is another model's: this one has no parameter {name!r}.{nearest(name, names)}"
            )
        if not isinstance(value, Tensor) or value.shape != (3,):
            raise ValueError(f"the scales of {name!r} in the state are {value!r:.80}, not three numbers")


def load(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Go on from what was saved, for weights as they are now: behind ``load_state_dict`` of model and optimizer."""
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        p = parameters[name]
        inv_scale, *rest = value.to(device=p.device, dtype=torch.float32, copy=True).unbind()
        exchange.leave(p, WrittenWeight(inv_scale.reshape(1, 1), torch.stack(rest), seen(p)))


def rows(model: nn.Module) -> list[tuple[str, ...]]:
    """A table's rows: weight, inv_scale, amax, who predicted the scale."""
    found = list(known(model))
    if not found:
        return []
    values = torch.stack([torch.cat([w.inv_scale.reshape(1), w.known[:1]]).cpu() for _, w in found]).tolist()
    return [
        (name, f"{inv_scale:.3g}", f"{amax:.4g}", LOADED if w.wanted is None else PREDICTED)
        for (name, w), (inv_scale, amax) in zip(found, values, strict=True)
    ]
