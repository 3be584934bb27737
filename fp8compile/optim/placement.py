"""Which of a parameter's states are encoded, in which format, and why others are not.

In order: an override on the parameter or its module; a pattern on its name; then FP32 for what is small, for embeddings
(Dettmers et al. 2021: some tokens' gradients are ~100 times larger), for shards that would cut groups; then the group's.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8compile._distributed import first_element, lies_by_channels, why_not_encoded
from fp8compile.numerics.states.channels_last import ChannelsLast
from fp8compile.numerics.states.interface import GROUP, StateCodec
from fp8compile.numerics.states.registry import state_codec
from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.formats import StateFormat, state_format_pair
from fp8compile.optim.overrides import overridden, override_in
from fp8compile.optim.plan import UpdatePlan

DEFAULT_FORMAT: StateFormat = "e4m3_expanded"
MIN_NUMEL = 4096
WHOLE = ("fp32", "bf16")
EXACT = state_codec("fp32", signed=True)
EMBEDDINGS = ("*embed*", "*wte.weight", "*wpe.weight", "*emb.weight")


@dataclass(frozen=True)
class Names:
    """What is known of the parameters apart from their values.

    Attributes:
        names: by ``id`` of the parameter.
        embeddings: ids of weights of embedding modules, where the model is known.
        overridden: formats by id, from overrides on modules of the model.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    embeddings: frozenset[int] = frozenset()
    overridden: Mapping[int, StateFormat] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Names:
        named = dict(model.named_parameters())
        kinds = (nn.Embedding, nn.EmbeddingBag)
        embeddings = (module.weight for module in model.modules() if isinstance(module, kinds))
        overridden = {id(named[name]): fmt for name, fmt in override_in(model).items() if name in named}
        return cls({id(p): name for name, p in named.items()}, frozenset(map(id, embeddings)), overridden)

    def is_embedding(self, p: Tensor) -> bool:
        name = self.names.get(id(p), "").lower()
        return id(p) in self.embeddings or (p.dim() == 2 and any(fnmatch.fnmatch(name, each) for each in EMBEDDINGS))


@dataclass(frozen=True)
class Placement:
    """How a parameter's states are stored, and the reason where that is not what the group asked for."""

    formats: tuple[str, str]
    reason: str | None = None

    def codec(self, signed: bool, group_size: int | None = GROUP) -> StateCodec:
        return state_codec(self.formats[0 if signed else 1], signed=signed, group_size=group_size)

    def codecs(self, update: CapturedUpdate) -> tuple[tuple[str, StateCodec], ...]:
        """How each state of an update is stored; FP32 where it has to stay exact."""
        return tuple(
            (state, EXACT if state in update.exact else self.codec(signed)) for state, signed in update.states.items()
        )

    def plan(self, update: CapturedUpdate, p: Tensor, master: str, seed: int) -> UpdatePlan:
        """Everything that fixes the compiled update of ``p``."""
        codecs, moved = self.codecs(update), lies_by_channels(p) and not update.whole_tensor
        codecs = tuple((state, ChannelsLast(codec)) for state, codec in codecs) if moved else codecs
        at_four = first_element(p) % 4 == 0
        return UpdatePlan(update, codecs, p.dtype, master, seed, begins_at_four=at_four, channels_last=moved)


def choose_placement(
    p: Tensor, state_format: StateFormat, names: Names, patterns: Mapping[str, StateFormat]
) -> Placement:
    """How a parameter of a group with ``state_format`` keeps its states."""
    placed = _asked_for(p, state_format, names, patterns)
    reason = None if set(placed.formats) <= {*WHOLE} else why_not_encoded(p, placed.formats)
    return Placement(("fp32", "fp32"), reason) if reason else placed


def _asked_for(p: Tensor, state_format: StateFormat, names: Names, patterns: Mapping[str, StateFormat]) -> Placement:
    """The placement of a parameter that is not sharded."""
    asked = overridden(p) or names.overridden.get(id(p))
    if asked:
        return Placement(state_format_pair(asked), "override")
    name = names.names.get(id(p))
    for pattern, fmt in patterns.items():
        if name is not None and fnmatch.fnmatch(name, pattern):
            return Placement(state_format_pair(fmt), f"named like {pattern}")
    wanted = state_format_pair(state_format)
    if set(wanted) <= {*WHOLE}:
        return Placement(wanted)
    reason = _why_whole(p, names)
    return Placement(("fp32", "fp32"), reason) if reason else Placement(wanted)


def _why_whole(p: Tensor, names: Names) -> str | None:
    if p.numel() < MIN_NUMEL:
        return f"{p.numel()} elements, fewer than {MIN_NUMEL}"
    return "an embedding" if names.is_embedding(p) else None


def check_parameter(p: Tensor, name: str) -> None:
    """Raises ValueError for a parameter whose dtype has no FP32 arithmetic."""
    if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name} is {str(p.dtype).removeprefix('torch.')}: parameters of fp8compile.optim are float32, bfloat16 or "
            "float16. Convert it, or give it to torch.optim in an optimizer of its own"
        )


def fixed_formats(model: nn.Module) -> dict[int, tuple[str, str]]:
    """By id, the formats of the parameters of ``model`` that do not follow their group's ``state_format``.

    These are overridden parameters, small ones, embeddings and shards that would cut groups.
    """
    names = Names.of(model)
    placed = {id(p): choose_placement(p, DEFAULT_FORMAT, names, {}) for p in model.parameters() if p.requires_grad}
    return {key: found.formats for key, found in placed.items() if found.reason is not None}
