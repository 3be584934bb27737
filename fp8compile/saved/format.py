"""Which one-byte format a saved value is stored in, by how it was made and by what the backward does with it (``"auto"``).

Both formats take a byte. With amax the largest magnitude of its group, a value x comes back

    INT8   off by at most amax / 254, whatever x is; |x| < amax / 254 comes back as 0
    E4M3   off by at most |x| / 16;                  |x| < amax / 458752 comes back as 0

and on groups of 128 Gaussian values INT8 is 11 dB better. So it is INT8, except for values whose small elements count:

  * compared with zero   relu, leaky relu (x <= 0), abs (sign): an element that came back as 0 has its gradient turned off. Of
        Gaussian values that is 0.4 % in INT8, one in 200,000 in E4M3. timm's resnet18, worst (median) gradient: INT8 13.6
        (16.6) dB, this rule 13.9 (16.5), E4M3 everywhere 13.7 (16.0), BF16 itself 14.0 (16.1).
  * made by exp          softmax, exp: with exponents of standard deviation 2 most elements lie e^-5 below their group's
        largest, which is one code of INT8. Squared errors do not show it, since the largest elements make up the norm; but
        a feature that is always small would get no gradient at all.

The cases next to these are not among them. INT8 is better for all edges that lie elsewhere, since its codes keep their side
(``fp8compile/saved/sides.py``), where E4M3 is off by up to |t| / 16 near an edge t:
  * compared with zero and with t != 0   relu6
  * compared with t != 0   clamp, hardtanh, hardswish: of clamp(x, -1, 1) of Gaussian x, 1.2 % of the mask is wrong in E4M3
  * compared after a shift   convolution -> batch norm -> relu, recomputed from the convolution's result
  * stored about a mean, or in deviations   its zeros lie anywhere among the codes, which keep their side
  * bounded functions written with exp   sigmoid, silu, gelu, tanh ...: they span no decades.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import ops
from torch.fx import Node

from fp8compile.analysis.reach import ZERO_KEEPING, is_exponential, reaches
from fp8compile.fx.graph import is_tensor, numel
from fp8compile.numerics import E4M3, INT8, Format

aten = ops.aten

_SIGN_KEEPING = ZERO_KEEPING | {aten.relu.default}
_ORDERS = {aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar}
_SIGNS = {aten.sign.default, aten.sgn.default, aten.signbit.default}


def format_by_use(made: Node, used: Node) -> tuple[Format, str]:
    """The format for a value, ``made`` in the forward and ``used`` in the backward, and the reason if it is not INT8."""
    if is_compared_with_zero(used) and not reaches(used, _SIGN_KEEPING, _has_an_edge_elsewhere):
        return E4M3, "compared with zero in the backward"
    if _is_made_by_exp(made):
        return E4M3, "made by exp: spans decades"
    return INT8, ""


def is_compared_with_zero(used: Node, but: Collection[Node] = ()) -> bool:
    """Whether the backward takes the sign of a value, in another place than ``but``."""
    return reaches(used, _SIGN_KEEPING, lambda user, value: user not in but and _is_ordered(user, value))


def _is_ordered(user: Node, _: Node) -> bool:
    return user.target in _SIGNS or user.target in _ORDERS


def _has_an_edge_elsewhere(user: Node, _: Node) -> bool:
    return user.target in _ORDERS and bool(user.args[1] != 0)


def _is_made_by_exp(made: Node) -> bool:
    """Whether a value is an elementwise exponential times anything; the exp of a scalar is a scale like any other."""
    seen, waiting, size = {made}, [made], numel(made.meta["val"])
    while waiting:
        node = waiting.pop()
        if is_exponential(node):
            return True
        parents = node.all_input_nodes if node.target in ZERO_KEEPING else []
        if node.target is aten.div.Tensor:
            parents = parents[:1]
        full = [p for p in parents if p not in seen and is_tensor(p) and numel(p.meta["val"]) == size]
        seen.update(full)
        waiting += full
    return False
