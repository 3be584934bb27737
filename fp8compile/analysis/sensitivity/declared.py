"""Operators that are not torch's, attention kernels of other libraries among them: how they answer to a rounded operand.

    gradient   an operand that is computed from gradients. A backward is linear in its gradient, whatever computes it, so a
               relative error of it is passed on. That is an assumption for an operator that nothing is known of: the report
               names it, and ``declare(op, exact=...)`` takes it back.
    linear     f(a x, y) = a f(x, y): the relative errors of such operands add up
    smooth     a relative error e becomes one of at most 2 e, as fused attention's q, k, v and result (``responses.py``)
    exact      nothing of the kind: what reads it stays exact, as all operands do that are not declared

The table holds operators of well-known libraries, by the names that their schemas give the arguments. One whose schema has
changed since is not known any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8compile import _torch as private
from fp8compile._messages import nearest

LINEAR, SMOOTH, EXACT = "linear", "smooth", "exact"
TORCHS_OWN = {"aten", "prims", "prim", "quantized", "c10d", "inductor", "rngprims", "fp8compile", private.COLLECTIVES}

Argument = int | str


@dataclass(frozen=True)
class Declaration:
    """How an operator answers to its operands, by their names in its schema."""

    linear: tuple[str, ...] = ()
    smooth: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()

    def of(self, name: str) -> str | None:
        """LINEAR, SMOOTH or EXACT; None for an operand that is not declared."""
        return next((how for how in (EXACT, SMOOTH, LINEAR) if name in getattr(self, how)), None)


# Fused attention's backward: the argument beside ``takes_as_gradient`` in responses.py. Its logsumexp stays exact.
_FLASH = Declaration(("dout",), ("q", "k", "v", "out"), ("softmax_lse",))
# Products of rows with the matrix of their expert, and their gradients: sums of products, each linear in either factor.
KNOWN: Mapping[str, Declaration] = {
    "flash_attn::_flash_attn_backward": _FLASH,
    "flash_attn::_flash_attn_varlen_backward": _FLASH,
    "xformers_flash::flash_bwd": Declaration(("dout",), ("query", "key", "value", "out"), ("softmax_lse_",)),
    "transformers::grouped_mm_fallback": Declaration(("input", "weight")),
    "transformers::grouped_mm_fallback_backward": Declaration(("input", "weight", "grad_output")),
}
_declared: dict[str, Declaration] = {}


def declare(
    op: Any,
    *,
    linear: Sequence[Argument] = (),
    smooth: Sequence[Argument] = (),
    exact: Sequence[Argument] = (),
) -> None:
    """Say how an operator of your own, or of a library, answers to operands that are off by a rounding.

    What is saved for an operator that fp8compile does not know stays exact. Declare its backward, once in a process and
    before the model is compiled, and what it reads may be stored in 8 bits. ``fp8compile.check`` measures what that does to
    the gradients of your batch.

    Args:
        op: its name, ``"mylib::attention_backward"``, or the operator itself (``torch.ops.mylib.attention_backward``).
        linear: operands that the result is linear in, such as the gradient, by position or by name.
        smooth: operands of which a relative error e makes the result off by at most 2 e, as those of attention.
        exact: operands that must be exact; also the gradient, where an operator is not linear in it.

    Raises:
        ValueError: there is no such operator or argument, an argument is no tensor or is named twice, or the operator was
            declared otherwise before.
    """
    found = _operator(op)
    given = {LINEAR: linear, SMOOTH: smooth, EXACT: exact}
    names = {how: tuple(_named(found, argument) for argument in each) for how, each in given.items()}
    every = [name for each in names.values() for name in each]
    if twice := next((name for name in every if every.count(name) > 1), None):
        raise ValueError(f"{name_of(found)}: argument {twice!r} is declared twice. Fix: name it once.")
    made, known = Declaration(**names), _declared.get(name_of(found))
    if known is not None and known != made:
        raise ValueError(
            f"{name_of(found)} was declared as {_text(known)} before, and now as {_text(made)}. Fix: declare it once."
        )
    _declared[name_of(found)] = made


def declarations_key() -> str:
    """All that was declared in this process: a part of the key of what is compiled."""
    return repr(sorted((name, dataclasses.astuple(each)) for name, each in _declared.items()))


def declaration_of(op: torch._ops.OpOverload) -> Declaration | None:
    """What is declared of an operator, or known of one whose schema is still the one that is known."""
    name = name_of(op)
    if name in _declared:
        return _declared[name]
    known = KNOWN.get(name)
    has = {argument.name for argument in op._schema.arguments}
    return known if known and {*known.linear, *known.smooth, *known.exact} <= has else None


def _operator(op: Any) -> torch._ops.OpOverload:
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        found = getattr(getattr(torch.ops, namespace), name.partition(".")[0], None) if name else None
        if found is None:
            raise ValueError(
                f"there is no operator {op!r}{_near(namespace, name)}. Fix: import what registers it first."
            )
        op = found
    op = getattr(op, "_opoverload", op)  # torch.library.custom_op
    if isinstance(op, torch._ops.OpOverloadPacket):
        overloads = op.overloads()  # type: ignore[no-untyped-call]
        op = getattr(op, "default" if "default" in overloads else overloads[0])
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"{op!r} is no operator. Fix: give its name, such as 'mylib::attention_backward'.")
    if op.namespace in TORCHS_OWN:
        raise ValueError(f"{name_of(op)} is torch's own: what is known of it does not change.")
    return op


def _near(namespace: str, name: str) -> str:
    return (
        nearest(name, dir(getattr(torch.ops, namespace)), listed=False)
        if name
        else "; names are 'namespace::operator'"
    )


def _named(op: torch._ops.OpOverload, argument: Argument) -> str:
    """The name of an argument that is a tensor, or a list of them."""
    arguments = op._schema.arguments
    names = [each.name for each in arguments]
    if isinstance(argument, bool) or argument not in (*names, *range(len(names))):
        raise ValueError(f"{name_of(op)} has no argument {argument!r}; it has {', '.join(names)}.")
    found = arguments[argument if isinstance(argument, int) else names.index(argument)]
    if "Tensor" not in str(found.type):
        raise ValueError(f"{name_of(op)}: argument {found.name!r} is no tensor but {found.type}. Fix: leave it out.")
    return str(found.name)


def name_of(op: torch._ops.OpOverload) -> str:
    """``namespace::operator``."""
    return str(op._schema.name)


def _text(declaration: Declaration) -> str:
    return ", ".join(f"{how}={names}" for how, names in dataclasses.asdict(declaration).items() if names) or "nothing"
