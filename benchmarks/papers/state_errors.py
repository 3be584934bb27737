"""What encoding m and v does to m / (sqrt(v) + eps): COAT's table, for codecs and states of any kind.

    MSE(A, B) = mean over all elements of (m_A / (sqrt(v_B) + eps) - m / (sqrt(v) + eps)) ** 2       eps = 1e-8

m_A, v_B: encoded once in formats A, B and decoded; m, v: FP32, from training. Elements whose m and v are 0 count; they
come back as 0. A plain format can send v > 0 to 0, and then m / eps swamps every mean. Ours gives the smallest code
instead (``numerics.states.plain``). ``e4m3, v to 0`` is the plain format without that rule, so that the table shows what
it is worth, and how many elements it concerns; the mean without those elements is given beside it.

One table has v rounded to nearest, as in the paper. In the other it is dithered (``numerics.dither``), as the optimizers
store it, which costs a single rounding some error and keeps v from lagging (``state_drift``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics.formats import E4M3, E5M2
from fp8compile.numerics.scaling import inv_scale_of, quantize
from fp8compile.numerics.states.dynamic_tree import decode_tree, encode_tree
from fp8compile.numerics.states.interface import Grouped, StateCodec, in_groups
from fp8compile.numerics.states.plain import LinearCodes
from fp8compile.numerics.states.range_expansion import Expanded, logarithms
from fp8compile.numerics.states.registry import state_codec

EPS = 1e-8
DECADES_OF_AN_OCTAVE = math.log(2) / math.log(10)
FIRST = ("e4m3", "e5m2", "e4m3_expanded", "e5m2_expanded", "dynamic_tree", "int8", "int8_companded", "bf16", "fp32")
FLUSHING = "e4m3, v to 0"


@dataclass(frozen=True)
class Flushing(LinearCodes):
    """Plain E4M3 rounded to nearest throughout: a small v decodes to 0."""

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        inv_scale = inv_scale_of(x_NG.abs().amax(-1, keepdim=True), self.format)
        return quantize(x_NG, inv_scale, self.format), inv_scale


@dataclass(frozen=True)
class ExpandedTree(Grouped):
    """COAT's DE8 + Exp: the dynamic tree of (|x| / max) ** k, where k spreads a group over the tree's 1 ... 1e-6 (-7)."""

    name = "dynamic_tree, expanded"

    def encode_groups(self, x_NG: Tensor) -> tuple[Tensor, ...]:
        a = x_NG.abs()
        amax, log_amax, log_amin, _ = logarithms(a, precise=True)
        log_target = (6 if self.signed else 7) * torch.log2(torch.tensor(10.0))
        k = torch.floor(16 * log_target / (log_amax - log_amin)).clamp(1, 255)
        k = torch.where(log_amax > log_amin, k, 16.0)
        unit = a / torch.where(amax > 0, amax, 1.0)
        codes, _ = encode_tree(unit ** (k / 16) * x_NG.sign(), self.signed, bits=8, dithers=self.dithers)
        return codes, amax, k

    def decode_groups(self, codes_NG: Tensor, *metadata_N1: Tensor) -> Tensor:
        amax, k = metadata_N1
        y = decode_tree(codes_NG, torch.ones_like(amax), self.signed, bits=8)
        return y.sign() * amax * y.abs() ** (16 / k)


def codecs(signed: bool, rounding: str = "dithered") -> dict[str, StateCodec]:
    """Every format that a moment can have, and the variants that exist for this table only; ``rounding`` is v's."""
    rounding = "nearest" if signed else rounding
    found = {name: state_codec(name, signed=signed, rounding=rounding) for name in FIRST}
    for fmt in (E4M3, E5M2):
        found[f"{fmt.name}_expanded, paper"] = Expanded(signed, format=fmt, expand_range="paper", rounding=rounding)
    found["dynamic_tree, expanded"] = ExpandedTree(signed, rounding=rounding)
    if signed:
        return found | {name: state_codec(name, signed=True) for name in ("dynamic4", "int4_companded")}
    few = ("linear4", "rank1_linear4", "log4", "log2")
    four_bit = {name: state_codec(name, signed=False, rounding=rounding) for name in few}
    return found | four_bit | {FLUSHING: Flushing(False, format=E4M3)}


@dataclass(frozen=True)
class Moments:
    """Both moments of one parameter, FP32."""

    name: str
    m: Tensor
    v: Tensor


class Errors:
    """Sums over parameters of the squared errors of every pair of formats, v rounded one way or the other."""

    def __init__(self, rounding: str = "dithered") -> None:
        self.m_codecs, self.v_codecs = codecs(signed=True), codecs(False, rounding)
        self.sums = {(a, b): 0.0 for a in self.m_codecs for b in self.v_codecs}
        self.kept_sums = dict.fromkeys(self.sums, 0.0)  # without elements whose v > 0 a plain format sends to 0
        self.elements = self.flushed = 0
        self.mean_square = 0.0

    def add(self, moments: Moments) -> None:
        """Count one parameter's moments in."""
        m, v = moments.m, moments.v
        exact = m.double() / (v.double().sqrt() + EPS)
        v_hats = {name: _there_and_back(codec, v) for name, codec in self.v_codecs.items()}
        flushed = (v > 0) & (v_hats[FLUSHING] == 0)
        denominators = {name: v_hat.double().sqrt() + EPS for name, v_hat in v_hats.items()}
        for a, codec in self.m_codecs.items():
            m_hat = _there_and_back(codec, m).double()
            for b, denominator in denominators.items():
                squares = (m_hat / denominator - exact).square()
                self.sums[a, b] += float(squares.sum())
                self.kept_sums[a, b] += float(squares.masked_fill(flushed, 0).sum())
        self.elements += m.numel()
        self.flushed += int(flushed.sum())
        self.mean_square += float(exact.square().sum())

    def table(self, kept: bool = False) -> dict[str, dict[str, float]]:
        """MSE by format of m, then of v."""
        sums, count = (self.kept_sums, self.elements - self.flushed) if kept else (self.sums, self.elements)
        return {a: {b: sums[a, b] / count for b in self.v_codecs} for a in self.m_codecs}


def _there_and_back(codec: StateCodec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x), x.shape)


def ratios(table: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How many times smaller the MSE is than plain E4M3's for both, by "m / v"."""
    plain = table["e4m3"]["e4m3"]
    return {f"{a} / {b}": plain / mse for a, row in table.items() for b, mse in row.items() if mse}


def ranges(several: Sequence[Moments]) -> dict[str, dict[str, Any]]:
    """Of the groups of m and of v: log10 of the range before and after expansion, and k, for both targets."""
    found: dict[str, dict[str, Any]] = {}
    for state, signed in (("m", True), ("v", False)):
        groups = [in_groups(getattr(each, state), 128).reshape(-1, 128) for each in several]
        _, log_amax, log_amin, _ = logarithms(torch.cat(groups).abs(), precise=True)
        log_range = log_amax - log_amin
        found[state] = {"log10_range": (log_range * DECADES_OF_AN_OCTAVE).flatten()}
        for target in ("code", "paper"):
            k = Expanded(signed, expand_range=target).k_of(log_range).flatten().float() / 16
            found[state] |= {f"k {target}": k, f"log10_range_after {target}": k * found[state]["log10_range"]}
    return found


def spread(x: Tensor) -> dict[str, float]:
    """Quantiles of a distribution."""
    at = {"least": 0.0, "1 %": 0.01, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "99 %": 0.99, "largest": 1.0}
    return {name: float(x.quantile(q)) for name, q in at.items()} | {"mean": float(x.mean())}
