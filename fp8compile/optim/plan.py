"""How one parameter is updated: a value with everything that fixes the compiled code, and the pure function it stands for.

step(tensors) = encode(update(decode(states)))   of one parameter, all in FP32 between
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8compile.fx import near_lowerings as near_lowerings  # tells Inductor
from fp8compile.fx.traced_calls import call_of
from fp8compile.numerics.rounding import drawn, key_at, nearest_bfloat16, round_stochastically, rows_and_lanes
from fp8compile.numerics.states.channels_last import MARK, ChannelsLast, by_channels, in_memory_order
from fp8compile.numerics.states.in_pieces import decoded_in_pieces, encoded_in_pieces
from fp8compile.numerics.states.interface import StateCodec, encoded_zeros
from fp8compile.numerics.states.scaled_weights import inv_scale_for, scaled, unscaled, weight_of
from fp8compile.numerics.states.split_weights import joined, split
from fp8compile.optim.captured_update import CapturedUpdate
from fp8compile.optim.step_bounds import Bound
from fp8compile.optim.step_codes import GROUP, KNOWN, Wanted, inv_scale_before, measured, written

MASTERS = ("none", "split", "fp32", "fp16_scaled")
MASTER16, INV_SCALE16 = "master_fp16", "master_inv_scale"  # of "fp16_scaled"
BY_ELEMENT = ("param", "grad", "correction", "master", MASTER16)  # tensors of the parameter's shape
EXPANDED = {"e4m3_expanded"}
Tensors = dict[str, Tensor]


def tensors_in_order(tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors of a channels_last parameter in the order of its memory, by the keys that ``UpdatePlan.in_order`` has."""
    return {name.replace(MARK, ""): in_memory_order(t) if name in BY_ELEMENT else t for name, t in tensors.items()}


def encoded_number(number: float, codec: StateCodec, p: Tensor) -> tuple[Tensor, ...]:
    """A state of which each element is ``number``."""
    if number == 0:
        return encoded_zeros(codec, p.shape, p.device)
    return codec.encode(torch.full(p.shape, number, dtype=torch.float32, device=p.device))


@dataclass(frozen=True)
class UpdatePlan:
    """The update of one parameter.

    Attributes:
        update: the optimizer's arithmetic.
        codecs: how each of its states is stored.
        dtype: the dtype of the parameter.
        master: how the bits that a 16-bit parameter lacks are kept: "none" (rounded stochastically), "split" (an 8-bit
            correction), "fp32", or "fp16_scaled" (FP16 under one scale, rounded stochastically); "none" for FP32.
        seed: the seed of the stochastic rounding.
        offset: the number of the parameter's elements before the view that is updated.
        codes: the codes of the new parameter that are written too.
        planes: in how many planes a group is updated (``planes.py``).
        begins_at_four: whether the number of its first element is a multiple of four: code then shares random words.
        in_pieces: whether states whose rows end in a short group are coded in two pieces: Inductor drops the tails of such
            loops on a CPU. Node by node the last bits may differ.
        by_rows: whether its tensors are viewed by rows of one group: code for it fits any number of them.
        any_width: whether it also fits rows of any width and stride (``small_parameters.py``).
        channels_last: whether states lie as the memory of a parameter that is not contiguous
            (``numerics/states/channels_last.py``); its codecs are ``ChannelsLast`` then.
    """

    update: CapturedUpdate
    codecs: tuple[tuple[str, StateCodec], ...]
    dtype: torch.dtype
    master: str = "none"
    seed: int = 0
    offset: int = 0
    codes: Wanted | None = None
    planes: int = 1
    begins_at_four: bool = False
    in_pieces: bool = False
    by_rows: bool = False
    any_width: bool = False
    channels_last: bool = False

    @property
    def in_order(self) -> UpdatePlan:
        """Of a channels_last parameter, the same update of tensors in the order of its memory (``tensors_in_order``)."""
        codecs = ((state, codec.codec) for state, codec in self.codecs if isinstance(codec, ChannelsLast))
        return replace(self, codecs=tuple(codecs), channels_last=False)

    @property
    def rounds_stochastically(self) -> bool:
        return self.master in ("none", "fp16_scaled") and self.dtype != torch.float32

    @property
    def bound(self) -> Bound:
        """Of a step that writes codes."""
        assert self.update.bound is not None
        return self.update.bound

    @property
    def groups_of_a_block(self) -> int:
        """How many groups of 128 a block of its kernel on a GPU updates; the more, the less each pays for what a group needs.

        As many as registers leave room for, counted on sm_90 (tests/sm90/test_optimizer_sm90.py): 96 with these and more
        than 112 with others. With 16, where each element has a random word of its own, 136 bytes a thread would spill.
        """
        if self.any_width:
            return 4
        names = {codec.name for _, codec in self.codecs}
        few = bool(names & EXPANDED) and names <= EXPANDED | {"dynamic_tree"}
        words = self.rounds_stochastically and not self.begins_at_four
        return 16 if few and self.master in ("none", "split") and self.codes is None and not words else 8

    def part_keys(self, state: str) -> list[str]:
        """The keys of a state's tensors in ``optimizer.state[p]``: ``exp_avg.e4m3_expanded.codes`` ..."""
        codec = dict(self.codecs)[state]
        return [f"{state}.{codec.name}.{part}" for part in codec.parts]

    @property
    def group_size(self) -> int | None:
        """Elements of a group, if everything is computed by group or by element; 1 if no state has groups."""
        if self.update.whole_tensor:
            return None
        sizes = {getattr(codec, "group_size", 1) for _, codec in self.codecs} - {1}
        sizes |= {GROUP} if self.codes else set()
        return 1 if not sizes else sizes.pop() if len(sizes) == 1 else None

    def initial(self, p: Tensor, largest: Tensor | None = None) -> Tensors:
        """The state of a parameter that has not been updated yet; ``step`` not included.

        Args:
            largest: the largest magnitude of the whole parameter, 0-d, where a master has a scale.
        """
        made: Tensors = {}
        begin = self.update.initial
        for state, codec in self.codecs:
            made |= zip(self.part_keys(state), encoded_number(begin[state], codec, p), strict=True)
        for state in self.update.singles:
            made[state] = torch.tensor(begin[state], dtype=torch.float32, device=p.device)
        if self.master == "split":
            made["correction"] = torch.zeros(p.shape, dtype=torch.int8, device=p.device)
        if self.master == "fp32":
            made["master"] = p.detach().float().clone()
        if self.master == "fp16_scaled":
            assert largest is not None
            inv_scale = inv_scale_for(largest)
            made |= {MASTER16: scaled(p.detach().float(), inv_scale), INV_SCALE16: inv_scale}
        return made

    def decoded(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensors:
        """The FP32 states that the stored tensors stand for."""
        found: Tensors = {}
        for state, codec in self.codecs:
            parts = [tensors[key] for key in self.part_keys(state)]
            with call_of(f"decode({state})"):
                found[state] = (
                    decoded_in_pieces(codec, parts, shape) if self.in_pieces else codec.decode(parts, shape)
                )
        return found

    def __call__(self, tensors: Tensors) -> Tensors:
        """The new values of the tensors of the same names.

        Args:
            tensors: ``param``, ``grad``, ``step`` (counting this step), ``numbers`` [n]; the state's parts; and for
                stochastic rounding ``stream``, int64 [2]: ``stream_of`` it, and the first element's index; where codes
                are written, their tensors, and ``weight.known``.
        """
        if self.channels_last:
            made, keys = self.in_order(tensors_in_order(tensors)), {name.replace(MARK, ""): name for name in tensors}
            return {keys[name]: by_channels(t) if name in BY_ELEMENT else t for name, t in made.items()}
        new_p, states = self._updated(tensors)
        new: Tensors = {}
        for state, codec in self.codecs:
            x = states[state]
            with call_of(f"encode({state})"):
                parts = encoded_in_pieces(codec, x) if self.in_pieces else codec.encode(x)
            new |= zip(self.part_keys(state), parts, strict=True)
        with call_of(f"store({self.master})"):
            new |= self.stored(new_p, tensors)
        return new | self._codes(new, tensors)

    def measured(self, tensors: Mapping[str, Tensor], encoded: Tensor | None = None) -> Tensors:
        """Of a parameter and states as they are, by group, what the bound of the next step is made of."""
        assert self.codes is not None
        weight = self._encoded(tensors) if encoded is None else encoded
        return measured(self.bound, weight, self._precise(tensors), self._as_stored(tensors, weight.shape))

    def _as_stored(self, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensors:
        """The states as they will be read. In the kernel that makes them Inductor drops a cast to BF16 and back."""
        decoded, first = self.decoded(tensors, shape), {state: self.part_keys(state)[0] for state, _ in self.codecs}
        return {
            state: nearest_bfloat16(x) if tensors[first[state]].dtype == torch.bfloat16 else x
            for state, x in decoded.items()
        }

    def _codes(self, new: Tensors, tensors: Tensors) -> Tensors:
        """The codes of a new parameter."""
        if self.codes is None:
            return {}
        weight = self._encoded(new)
        known, n = tensors[KNOWN], self._named(tensors)
        inv_scale = inv_scale_before(self.codes, self.bound, known, n, tensors["step"], self.dtype)
        return written(weight, inv_scale) | self.measured(tensors | new, weight)

    def _encoded(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The stored parameter in the dtype that graphs encode it from, as FP32."""
        assert self.codes is not None
        if self.master == "fp32":
            return nearest_bfloat16(tensors["master"])
        p = tensors["param"].float()
        return nearest_bfloat16(p) if (self.dtype, self.codes.dtype) == (torch.float32, torch.bfloat16) else p

    def fresh_states(self, tensors: Tensors) -> Tensors:
        """The states of the next step in FP32, as the parameter update sees them, before they are encoded."""
        return self._updated(tensors)[1]

    def _updated(self, tensors: Tensors) -> tuple[Tensor, Tensors]:
        return self.moved(tensors, self.decoded(tensors, tensors["param"].shape))

    def moved(self, tensors: Tensors, states: Tensors) -> tuple[Tensor, Tensors]:
        """The new parameter, in FP32, and the new states, from decoded ones."""
        g, named = tensors["grad"].float(), self._named(tensors)
        return self.update(self._precise(tensors), g, states, named)

    def _named(self, tensors: Tensors) -> Tensors:
        return {
            name: tensors["numbers"].select(0, i)
            for i, name in enumerate((*self.update.names, *self.update.bound_names))
        }

    def _precise(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The parameter in FP32, with the bits kept elsewhere."""
        if self.master == "split":
            return joined(tensors["param"], tensors["correction"])
        if self.master == "fp16_scaled":
            return unscaled(tensors[MASTER16], tensors[INV_SCALE16])
        return tensors["master"] if self.master == "fp32" else tensors["param"].float()

    def stored(self, p: Tensor, tensors: Tensors) -> Tensors:
        """A new parameter as it is kept, with the bits kept elsewhere."""
        if self.dtype == torch.float32:
            return {"param": p}
        if self.master == "split":
            weight, correction = split(p, self.dtype)
            return {"param": weight, "correction": correction}
        if self.master == "fp32":
            return {"param": p.to(self.dtype), "master": p}
        stream, first = tensors["stream"].unbind()
        key = key_at(self.seed, stream, tensors["step"].expand(p.shape))  # expanded: the key is no kernel of its own
        shape, stride = p.shape or (1,), tensors["param"].stride() or (1,)
        index, lane = rows_and_lanes(shape, first + self.offset, stride)
        dtype = torch.float16 if self.master == "fp16_scaled" else self.dtype
        at_four = self.begins_at_four and all(each % 4 == 0 for each in (self.offset, *stride[:-1]))
        bits = drawn(dtype, index, key, lane, at_four=at_four).reshape(p.shape)
        if self.master == "fp16_scaled":
            inv_scale = tensors[INV_SCALE16]
            master = scaled(p, inv_scale, bits)
            return {"param": weight_of(master, inv_scale, self.dtype), MASTER16: master}
        return {"param": round_stochastically(p, self.dtype, bits)}
