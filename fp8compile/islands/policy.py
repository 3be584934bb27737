"""Which operations of a 16-bit model may leave FP16's range, and which only seem to, with the argument for each.

FP16 holds 2**-24 ... 65504, at full precision from 2**-14. An operation is in WIDEN if ordinary inputs (of magnitude 1 to
100) can take its result out of that range. It is in LEFT if they cannot, or if the price is out of proportion: calibration
finds such cases. Operations are named as in aten, without overload; an operation from a decomposition has the name of what
was decomposed. A bounded function is never unsafe, however it is written out (``reach.is_exponential``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import Node

from fp8compile.analysis.dataflow import Source
from fp8compile.analysis.linears import ALL
from fp8compile.analysis.reach import EXPONENTS, LAYOUT, LINEAR, is_exponential, reaches
from fp8compile.fx.graph import is_tensor, numel, size_hint, storage_root
from fp8compile.fx.ops import contracts, is_view, opname
from fp8compile.numerics.formats import FP16_MAX

aten = torch.ops.aten

LONG = 1024  # elements of a sum: with entries of 64 it reaches 65536
SHARP = 8.0  # a factor on logits, such as 1 / temperature
FAR = 2.0**14  # a factor that takes a value of 1 out of FP16's full precision, one way or the other
SCORES = (
    2.0**-8
)  # a factor on scores, as 1 / d: logits of 256, far beyond where a softmax saturates, were 65536 before it

WIDEN: Mapping[str, str] = {
    "exp": "FP16 ends at exp(11.09), and below exp(-9.7) it loses bits",
    "exp2": "FP16 ends at 2**16",
    "expm1": "FP16 ends at exp(11.09)",
    "sinh": "grows as exp",
    "cosh": "grows as exp",
    "tan": "has poles",
    "pow": "a square leaves FP16 at 256, and below 2**-7 it loses bits",
    "reciprocal": "an input below 2**-16 gives inf, one above 2**14 loses bits",
    "rsqrt": "an input that flushed to zero gives inf",
    "prod": "grows with every factor",
    "cumprod": "grows with every factor",
    "logcumsumexp": "sums exponentials",
    "logsumexp": "sums exponentials",
    "_logcumsumexp": "sums exponentials",
    "logaddexp": "sums exponentials",
    "linalg_vector_norm": "sums squares",
    "norm": "sums squares",
    "dist": "sums squares",
    "renorm": "divides by a norm",
    "var": "sums squares",
    "var_mean": "sums squares",
    "std": "sums squares",
    "std_mean": "sums squares",
    "_log_softmax": "reaches down as far as the logits spread",
    "nll_loss_forward": "adds up the weights of all rows",
    "nll_loss2d_forward": "adds up the weights of all pixels",
    "mse_loss": "squares",
    "smooth_l1_loss": "squares",
    "huber_loss": "squares",
    "kl_div": "adds up logarithms",
    "binary_cross_entropy": "takes logarithms of what may be zero",
}

LEFT: Mapping[str, str] = {
    "_softmax": "within 0 ... 1, and decomposed in FP32",
    "native_layer_norm": "its result is normalised: within sqrt(N) times its weight; decomposed in FP32",
    "native_group_norm": "the same",
    "_native_batch_norm_legit_functional": "the same",
    "_fused_rms_norm": "the same",
    "mean": "within the range of its inputs; generated code adds up in FP32",
    "amax": "one of its inputs",
    "add": "needs two values near the end of the range: calibration sees them",
    "log": "its result is small; what must not flush to zero is its operand, which then stays FP32 (see POLES)",
    "log1p": "the same",
    "log2": "the same",
    "log10": "the same",
    "sqrt": "brings a value into range",
    "acos": "within 0 ... pi; AMP widens it for its slope at 1, not for its range",
    "asin": "the same",
    "erfinv": "within 3.2 for an FP16 input below 1; AMP widens it for its slope",
    "l1_loss": "a mean of differences",
    "mm": "of a linear: a trained network keeps its results near 1, and in FP32 it costs ten times as much: calibration",
    "convolution": "the same",
    "_scaled_dot_product_flash_attention": "computes its softmax in FP32",
    "silu": "within its input; the gate times the up projection is a product of two results of linears: calibration",
}

POLES = ("log", "log2", "log10", "reciprocal", "rsqrt")  # an operand that flushed to zero becomes infinite here


def name_of(node: Node) -> str:
    """The aten operation, without overload, that the user's call became before it was decomposed."""
    written = node.meta.get("original_aten")
    target = written if isinstance(written, torch._ops.OpOverload) else node.target
    return getattr(target, "_opname", "")


def overflow_reason(node: Node, sources: Mapping[Node, Source], prescaled: Mapping[Node, float]) -> str | None:
    """Why a 16-bit value of the forward may leave FP16's range, by policy; None where policy has no reason.

    ``prescaled`` are the factors of ``prescale_factors``.
    """
    own, written = opname(node), name_of(node)
    if own in ("sum", "cumsum"):
        length = _summed(node)
        return f"{own} of {length} elements" if length >= LONG else None
    if node.target in ALL:
        return _matmul_of_activations(node, sources, prescaled)
    if own in ("mul", "div"):
        return _square(node) or _far_factor(node) or _sharpened(node) or _quotient(node)
    if node.target in EXPONENTS:
        return f"{own}: {WIDEN[own]}" if is_exponential(node) else None
    if own == "pow" and not _grows(node):
        return None
    if own in WIDEN:
        return f"{own}: {WIDEN[own]}"
    return f"{written}: {WIDEN[written]}" if written in WIDEN else None


def is_pole(user: Node, value: Node) -> bool:
    """Whether ``user`` has a pole where ``value`` is zero."""
    if opname(user) in POLES:
        return True
    divisor = user.args[1] if user.target is aten.div.Tensor else None
    return isinstance(divisor, Node) and storage_root(divisor) is storage_root(value)


def ends_island(user: Node, sources: Mapping[Node, Source]) -> bool:
    """Whether ``user`` is a linear, a convolution or fused attention, whose kernels take 16-bit operands in a 16-bit model.
    By policy an island ends before these; by calibration it need not."""
    if user.target in ALL:
        at = ALL[user.target]
        return any(isinstance(n, Node) and sources[n] == Source.PARAMETER for n in user.args[at : at + 2])
    return contracts(user)


def prescale_factors(sources: Mapping[Node, Source]) -> dict[Node, float]:
    """Values that were multiplied by constants below one on their way, with the product of these constants."""
    found: dict[Node, float] = {}
    for node in sources:
        if node.op != "call_function":
            continue
        factor = min(_constant_factor(node), 1.0)
        if is_view(node) or node.target in ALL or opname(node) in _CARRY:
            factor *= math.prod(found.get(parent, 1.0) for parent in set(node.all_input_nodes))
        if factor < 1:
            found[node] = factor
    return found


_CARRY = ("convert_element_type", "_to_copy", "clone", "mul", "neg")
_CAPPED = LINEAR | {aten.tanh.default}  # from a matmul to the exponential of its scores


def _matmul_of_activations(node: Node, sources: Mapping[Node, Source], prescaled: Mapping[Node, float]) -> str | None:
    """A matmul is a linear's (see LEFT) only where an operand is made of parameters alone. Of the others, these are left:

    scores     exponentiated, as in a softmax, and scaled as attention scales: by about 1 / sqrt(d) in all, and by no less
               than SCORES after the matmul. A trained softmax has small logits, and so small scores before a mild factor
    a mean     of products, divided by their number *before* they are added up: as large as one of them
    weighted   by probabilities: a mean of the other operand

    Other factors after a matmul do not help: a value that left FP16's range in the matmul is infinite already.
    """
    at = ALL[node.target]
    left, right = operands = [n for n in node.args[at : at + 2] if isinstance(n, Node)]
    if any(sources[n] == Source.PARAMETER for n in operands) or any(map(_is_probability, operands)):
        return None
    inner = size_hint(left.meta["val"].shape[-1])
    before = prescaled.get(left, 1.0) * prescaled.get(right, 1.0)
    if before * inner <= 1 or _are_scores(before, _factors_to_exponent(node), inner):
        return None
    return f"a matmul of two activations over {inner}, unscaled: entries of {(FP16_MAX / inner) ** 0.5:.0f} are too large"


def _are_scores(before: float, behind: Collection[float], inner: int) -> bool:
    """Whether scores are scaled by at most 2 / sqrt(inner) in all (Gemma uses another layer's size), mildly ``behind``."""
    return (
        bool(behind) and min(behind) >= SCORES and before * max(behind) <= 2 / inner**0.5 and before * max(behind) < 1
    )


def _factors_to_exponent(scores: Node) -> list[float]:
    """The constants that ``scores`` are multiplied by on the ways to where they are exponentiated, capped or not."""
    found: list[float] = []
    seen, waiting = {scores}, [(scores, 1.0)]
    while waiting:
        node, factor = waiting.pop()
        for user in node.users:
            if is_exponential(user):
                found.append(factor)
            elif user.target in _CAPPED and is_tensor(user) and user not in seen:
                seen.add(user)
                waiting.append((user, factor * _constant_factor(user)))
    return found


def _is_probability(node: Node) -> bool:
    while is_view(node) or opname(node) in ("convert_element_type", "clone"):
        node = node.args[0]  # type: ignore[assignment]
    return name_of(node) == "_softmax"


def _square(node: Node) -> str | None:
    same = node.target is aten.mul.Tensor and node.args[0] is node.args[1]
    return f"a square: {WIDEN['pow'].removeprefix('a square ')}" if same else None


def _far_factor(node: Node) -> str | None:
    factor = _constant_factor(node)
    if FAR >= factor >= 1 / FAR:
        return None
    return f"a factor of {factor:.3g}"


def _sharpened(node: Node) -> str | None:
    factor = _constant_factor(node)
    if factor < SHARP or not reaches(node, LAYOUT, lambda user, _: user.target is aten.amax.default):
        return None  # not for a softmax, which begins with the largest logit
    return f"logits times {factor:.3g}: a softmax takes any, FP16 does not"


def _constant_factor(node: Node) -> float:
    """|c| where a node is x * c or x / c with a number c; 1 where it is neither, or c is zero or not finite."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) < 2:
        return 1.0
    constant: Any = node.args[1]
    if isinstance(constant, Node):
        size = constant.meta.get("val")
        constant = size_hint(size) if isinstance(size, torch.SymInt) else _filled_with(constant)
    if not isinstance(constant, (int, float)) or not 0 < abs(constant) < float("inf"):
        return 1.0
    return abs(constant) if node.target is aten.mul.Tensor else 1 / abs(constant)


def _filled_with(node: Node) -> object:
    root = storage_root(node)
    return root.args[1] if root.target is aten.full.default else None


def _quotient(node: Node) -> str | None:
    divisor = node.args[1] if node.target is aten.div.Tensor else None
    if not isinstance(divisor, Node) or not is_tensor(divisor) or _filled_with(divisor) is not None:
        return None
    return "a quotient: a divisor below 2**-16 gives inf"


def _grows(node: Node) -> bool:
    exponent = node.args[1]
    return not isinstance(exponent, (int, float)) or exponent < 0 or exponent > 1


def _summed(node: Node) -> int:
    """How many elements go into one of the results."""
    source = node.args[0]
    assert isinstance(source, Node)
    if opname(node) == "cumsum":
        shape, dim = source.meta["val"].shape, node.args[1]
        return size_hint(shape[dim]) if shape else 1
    return numel(source.meta["val"]) // max(numel(node.meta["val"]), 1)
