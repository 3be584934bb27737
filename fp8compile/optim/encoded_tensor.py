"""A tensor that is FP32 for all computations, and is stored as codes.

    read     x        = decode(parts)
    write    parts   <- encode(x)          after an in-place operation on x

torch.compile splits it into its parts before it sees the graph, so an optimizer that knows nothing of codes compiles into
decode, update, encode. Every operation returns a plain FP32 tensor, except those that only pass on what is stored:
``detach``, ``clone``, ``to`` a device, ``copy_`` from the same format. A view is a *copy*: writing into one changes nothing.
State dicts hold the parts, not such tensors (fp8compile/optim/compress.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile import _torch as private
from fp8compile.numerics.states.custom_ops import decode_state, encode_state
from fp8compile.numerics.states.interface import StateCodec
from fp8compile.numerics.states.registry import state_codec

aten = torch.ops.aten

Context = tuple[str, bool]
HANDED_ON = (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default)


class EncodedTensor(Tensor):
    """An FP32 tensor stored in a state format.

    Attributes:
        format: its name, one of STATE_FORMATS.
        signed: whether values may be negative.
    """

    format: str
    signed: bool

    __torch_function__ = private.disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> EncodedTensor:
        strides = torch.empty(shape, device="meta").stride()
        return private.make_wrapper_subclass(
            cls, tuple(shape), strides=strides, dtype=torch.float32, device=parts[0].device
        )

    def __init__(self, parts: Sequence[Tensor], shape: Sequence[int], format: str, signed: bool) -> None:
        self.format, self.signed = format, signed
        for name, part in zip(self.codec.parts, parts, strict=True):
            setattr(self, f"part_{name}", part)

    @classmethod
    def of(cls, x: Tensor, format: str, signed: bool) -> EncodedTensor:
        """``x`` encoded."""
        return cls(encode_state(x.detach().float(), format, signed), x.shape, format, signed)

    @property
    def codec(self) -> StateCodec:
        return state_codec(self.format, signed=self.signed)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by the codec's names for them."""
        return {name: getattr(self, f"part_{name}") for name in self.codec.parts}

    def decode(self) -> Tensor:
        """The FP32 values, as a plain tensor."""
        x: Tensor = decode_state(list(self.parts.values()), self.shape, self.format, self.signed)
        return x

    def write(self, x: Tensor) -> None:
        """Store ``x`` in the memory of the parts; if ``x`` is encoded in the same way, its parts are copied as they are."""
        if isinstance(x, EncodedTensor) and (x.format, x.signed, x.shape) == (self.format, self.signed, self.shape):
            new = list(x.parts.values())
        else:
            x = (x.decode() if isinstance(x, EncodedTensor) else x).to(self.device, torch.float32)
            new = encode_state(x if x.shape == self.shape else x.expand(self.shape), self.format, self.signed)
        for part, value in zip(self.parts.values(), new, strict=True):
            part.copy_(value)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> EncodedTensor:
        return EncodedTensor([fn(part) for part in self.parts.values()], self.shape, self.format, self.signed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EncodedTensor({self.format}, shape={tuple(self.shape)}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return [f"part_{name}" for name in self.codec.parts], (self.format, self.signed)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> EncodedTensor:
        names = (f"part_{name}" for name in state_codec(context[0], signed=context[1]).parts)
        return EncodedTensor([inner[name] for name in names], outer_size, *context)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for the key of torch.compile's caches."""
        parts = ((p.dtype, tuple(p.shape), p.stride(), p.device) for p in self.parts.values())
        return f"EncodedTensor {self.format} {self.signed} {tuple(self.shape)} {[*map(str, parts)]}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in HANDED_ON and kwargs.get("dtype") in (None, torch.float32):
            kept = {k: v for k, v in kwargs.items() if k in ("device", "non_blocking")}
            return args[0].mapped(lambda part: func(part, **kept))
        if func is aten.copy_.default and isinstance(args[0], cls):
            args[0].write(args[1])
            return args[0]
        return _on_values(func, args, kwargs)


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func`` on decoded values; the tensors it writes into are encoded again."""
    values: dict[int, tuple[EncodedTensor, Tensor]] = {}

    def decoded(t: EncodedTensor) -> Tensor:
        if id(t) not in values:
            values[id(t)] = t, t.decode()
        return values[id(t)][1]

    plain_args, plain_kwargs = private.tree_map_only(EncodedTensor, decoded, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    of_value = {id(value): t for t, value in values.values()}
    for t in _written(func, args, kwargs):
        t.write(values[id(t)][1])
    return private.tree_map_only(Tensor, lambda t: of_value.get(id(t), t), result)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[EncodedTensor]:
    """The encoded arguments that ``func`` changes according to its schema, also those inside lists."""
    found: list[EncodedTensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            several = value if isinstance(value, (list, tuple)) else [value]
            found += [t for t in several if isinstance(t, EncodedTensor)]
    return found
