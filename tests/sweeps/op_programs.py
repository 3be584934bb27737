"""Programs around one operation, or one module: its samples in PyTorch's database, and what stands before and behind it.

An operation alone saves little: its inputs are the caller's leaves, its output nobody needs. Here t is a leaf with gradient,
w and v are parameters, and y = t + w or t * w (w being 0 or 1, so that y is t and stays in the operation's domain):

  sum            y = t + w, loss = mean(v op(y))           what the operation saves itself is an activation; so is its result
  product        y = t * w, loss = mean(v op(y)²)          t is kept for w's gradient: y may be made again from codes of t,
                                                           and op(y) from that; the gradient that reaches op is made of codes
  compared       y = t * w, loss = mean(op(y) v) + mean(amax(op(y), -1))       the result is compared with its own maximum
  exponentiated  y = t * w, loss = mean(v exp(op(y) 20 / max |op(y)|))         the result is exponentiated

In the last two a value is read in the backward that the operation may have made again from codes: the analysis has to see
the comparison, or the exponential, behind the operation.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import make_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import UnaryUfuncInfo
from torch.utils import _pytree as pytree

WRAPPERS = ("sum", "compared", "exponentiated", "product")
CONSIDERED = 24  # samples of the database that are looked at, of which two are taken,
AT_MOST = 400  # not counting empty ones
LARGE = (16, 32)
EXPONENT = 20.0


@functools.cache
def operations() -> dict[str, Any]:
    """Every entry of the operator database, by name and variant."""
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


@dataclass(frozen=True)
class Sample:
    """One call of an operation, or of a module, flattened: which leaves are tensors with a gradient (``varied``), which
    not (``fixed``)."""

    op: Any
    leaves: tuple[Any, ...]
    spec: Any
    varied: tuple[int, ...]
    fixed: tuple[int, ...]
    process: Callable[..., Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.varied]

    @property
    def others(self) -> list[Tensor]:
        return [self.leaves[i] for i in self.fixed]

    def to(self, dtype: torch.dtype) -> Sample:
        """The same call with its floating tensors in ``dtype``."""
        leaves = [
            x.detach().to(dtype).requires_grad_(x.requires_grad)
            if isinstance(x, Tensor) and x.is_floating_point()
            else x
            for x in self.leaves
        ]
        return replace(self, op=copied(self.op, dtype), leaves=tuple(leaves))

    @property
    def about(self) -> str:
        return self.call([_text(leaf) for leaf in self.leaves])[:160]

    def call(self, written: Sequence[str]) -> str:
        """The call in Python, its leaves as they are ``written``."""
        args, kwargs = pytree.tree_unflatten([_Written(text) for text in written], self.spec)
        return ", ".join([*map(repr, args), *(f"{k}={v!r}" for k, v in kwargs.items())])

    def run(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
        """The operation with ``tensors`` in the places of its varied leaves and ``others`` in those of its fixed ones."""
        leaves = list(self.leaves)
        for place, value in zip((*self.varied, *self.fixed), (*tensors, *others), strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.process(self.op(*args, **kwargs))


class _Written(str):
    def __repr__(self) -> str:
        return str(self)


def samples_of(op: Any, dtype: torch.dtype, seed: int = 0) -> list[Sample]:
    """The first samples of an entry that are not empty, deterministic."""
    torch.manual_seed(seed)
    found = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd and dtype.is_floating_point)
    full = first_full(_sample(op, entry) for entry in found)
    return [_enlarged(op, full[0], dtype), *full] if isinstance(op, UnaryUfuncInfo) and full else full


def first_full(samples: Iterable[Sample]) -> list[Sample]:
    """The first CONSIDERED that are not empty, among the first AT_MOST."""
    looked_at = itertools.islice(samples, AT_MOST)
    return list(itertools.islice((s for s in looked_at if all(t.numel() for t in s.tensors)), CONSIDERED))


def chosen(candidates: Sequence[Sample], works: Callable[[Sample], bool], number: int) -> list[Sample]:
    """The largest samples that ``works``, unlike in structure or constants where there are such; the largest first."""
    order = sorted(candidates, key=lambda s: -sum(t.numel() for t in s.tensors))
    found: list[Sample] = []
    for wants_unlike in (True, False):
        for sample in order:
            if len(found) == number:
                return found
            unlike = all(_constants(sample) != _constants(other) for other in found)
            if unlike >= wants_unlike and not any(sample is other for other in found) and works(sample):
                found.append(sample)
    return found


class Program(nn.Module):
    """One operation with what stands before and behind it. ``forward`` is written out, one line after the other, so that
    tracing it costs no more than it must; it returns the loss, and the results that have no gradient.
    """

    forward: Callable[..., Any]

    def __init__(self, source: str, op: Any, ws: Sequence[Tensor], vs: Sequence[Tensor]) -> None:
        super().__init__()
        self.source = source
        if isinstance(op, nn.Module):
            self.op = copied(op)  # with gradients and running statistics of its own
        for name, values in (("w", ws), ("v", vs)):
            for i, value in enumerate(values):
                self.register_parameter(f"{name}{i}", nn.Parameter(value))

    def gradients(self, ts: Sequence[Tensor]) -> dict[str, Tensor]:
        named = [*((f"t{i}", t) for i, t in enumerate(ts)), *self.named_parameters()]
        return {name: value.grad for name, value in named if value.grad is not None}


def program(sample: Sample, wrapper: str, seed: int = 0) -> Program:
    """The program of a sample in one of WRAPPERS."""
    outs = results(sample.run([t + 0 for t in sample.tensors], sample.others))
    smooth = {path: as_real(o).detach() for path, o in outs.items() if o.requires_grad and o.numel()}
    names = {"torch": torch, "op": sample.op, "process": sample.process, "as_real": as_real}
    source = _source(sample, wrapper, outs, smooth, names)
    exec(compile(source, f"<{sample.op}>", "exec"), names)
    fill = torch.zeros_like if wrapper == "sum" else torch.ones_like
    generator = torch.Generator().manual_seed(seed + 1)
    ws, vs = [fill(t.detach()) for t in sample.tensors], [_weights(o, generator) for o in smooth.values()]
    made: Program = type("Made", (Program,), {"forward": names["forward"]})(source, sample.op, ws, vs)
    return made


def copied(op: Any, dtype: torch.dtype | None = None) -> Any:
    """A module anew, its floating parameters and buffers in ``dtype``; a function as it is."""
    return copy.deepcopy(op).to(dtype) if isinstance(op, nn.Module) else op


def is_differentiable(sample: Sample) -> bool:
    return any(o.requires_grad for o in results(sample.run([t + 0 for t in sample.tensors], sample.others)).values())


def _source(
    sample: Sample, wrapper: str, outs: dict[str, Tensor], smooth: dict[str, Tensor], names: dict[str, Any]
) -> str:
    """``forward`` in Python; constants that cannot be written go into ``names``."""
    count, rest = range(len(sample.varied)), range(len(sample.fixed))
    taken = ", ".join(["self", *(f"t{i}" for i in count), *(f"x{i}" for i in rest)])
    operator = "+" if wrapper == "sum" else "*"
    written = [_literal(leaf, f"c{i}", names) for i, leaf in enumerate(sample.leaves)]
    for place, name in zip(
        (*sample.varied, *sample.fixed), [f"y{i}" for i in count] + [f"x{i}" for i in rest], strict=True
    ):
        written[place] = name
    lines = [f"y{i} = t{i} {operator} self.w{i}" for i in count]
    function = "self.op" if isinstance(sample.op, nn.Module) else "op"
    lines += [f"out = process({function}({sample.call(written)}))"]
    if smooth:
        lines += [f"o{i} = {'as_real' if outs[path].is_complex() else ''}({path})" for i, path in enumerate(smooth)]
        losses = [_consumed(f"o{i}", f"self.v{i}", o, wrapper) for i, o in enumerate(smooth.values())]
    else:  # nothing to differentiate: what the operation reads is kept for something else
        losses = [f"y{i}.square().mean()" for i in count] or ["torch.zeros(())"]
    unsmooth = ", ".join(f"{path}.detach()" for path in outs if path not in smooth)
    lines += [f"return {' + '.join(f'({x}).float()' for x in losses)}, [{unsmooth}]"]
    return f"def forward({taken}):\n" + "".join(f"    {line}\n" for line in lines)


def _consumed(o: str, v: str, value: Tensor, wrapper: str) -> str:
    """The loss of one result: see the head of this file."""
    if wrapper == "sum":
        return f"({v} * {o}).mean()"
    if wrapper == "product":
        return f"({v} * {o}.square()).mean()"
    if wrapper == "compared":
        return f"({v} * {o}).mean() + {o}" + (".amax(-1).mean()" if value.dim() else "")
    largest = float(value.abs().max())
    return f"({v} * torch.exp({o} * {EXPONENT / largest if largest > 0 else EXPONENT!r})).mean()"


def results(out: Any, path: str = "out") -> dict[str, Tensor]:
    """The tensors of a result by the expression that reads them, whatever they are packed in."""
    if isinstance(out, Tensor):
        return {path: out}
    parts = enumerate(out) if isinstance(out, (tuple, list)) else ()
    return {name: o for i, part in parts for name, o in results(part, f"{path}[{i}]").items()}


def as_real(out: Tensor) -> Tensor:
    return torch.view_as_real(out.resolve_conj()) if out.is_complex() else out


def _literal(leaf: Any, name: str, names: dict[str, Any]) -> str:
    if leaf is None or isinstance(leaf, (bool, int, str)) or (isinstance(leaf, float) and math.isfinite(leaf)):
        return repr(leaf)
    names[name] = leaf
    return name


def _weights(out: Tensor, generator: torch.Generator) -> Tensor:
    """Weights away from zero, of either sign, so that nothing cancels by symmetry."""
    random = torch.rand(out.shape, generator=generator, dtype=torch.float32)
    return torch.where(random < 0.5, random - 1.0, random + 0.5).to(out.dtype)


def _sample(op: Any, entry: Any) -> Sample:
    process = entry.output_process_fn_grad or (lambda out: out)
    return called(op.get_op(), (entry.input, *entry.args), dict(entry.kwargs), process)


def called(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], process: Callable[..., Any]) -> Sample:
    """The sample of this call."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    varied = tuple(
        i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()
    )
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    fixed = tuple(i for i in tensors if i not in varied)
    return Sample(op, tuple(leaves), spec, varied, fixed, process)


def _enlarged(op: UnaryUfuncInfo, sample: Sample, dtype: torch.dtype) -> Sample:
    """A function's sample at a size that shows what happens near its kinks and poles: 20 numbers seldom come close."""
    if len(sample.varied) != 1 or sample.fixed:
        return sample
    low, high = (
        None if x is None else x + e for x, e in zip(op.domain, (op._domain_eps, -op._domain_eps), strict=True)
    )
    leaves = list(sample.leaves)
    leaves[sample.varied[0]] = make_tensor(LARGE, device="cpu", dtype=dtype, low=low, high=high, requires_grad=True)
    return replace(sample, leaves=tuple(leaves))


def _constants(sample: Sample) -> str:
    return str([repr(leaf) if not isinstance(leaf, Tensor) else leaf.dim() for leaf in sample.leaves]) + str(
        sample.spec
    )


def _text(leaf: Any) -> str:
    return f"{list(leaf.shape)}" if isinstance(leaf, Tensor) else getattr(leaf, "__name__", str(leaf))
