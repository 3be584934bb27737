"""What the passes did to a graph: an entry for each tensor, linear, island and observed value."""

from __future__ import annotations

from dataclasses import dataclass

from fp8compile.fx.provenance import Origin


@dataclass(frozen=True)
class Saved:
    """A tensor kept for the backward as codes. Bytes are at the shapes of the compilation.

    ``belongs_to`` is "input 3" or "output 0" where the caller has the tensor too (see fp8compile/compiler/saved_versions.py).
    """

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes_before: int
    bytes_after: int
    codec: str
    belongs_to: str = ""


@dataclass(frozen=True)
class Skip:
    """Something left as it was, and why. ``bytes`` is what it keeps (0 where the question does not arise)."""

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Recomputed:
    """A tensor no longer kept because the backward makes it from ``sources``, which are kept anyway."""

    name: str
    origin: Origin
    shape: str
    dtype: str
    bytes_before: int
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Linear:
    """One product of a linear ``[M, K] x [K, N]``: ``formats`` of its two operands, or the ``reason`` it was left."""

    name: str
    origin: Origin
    direction: str  # "forward", "dgrad" or "wgrad"
    M: str
    K: str
    N: str
    formats: str
    reason: str = ""


@dataclass(frozen=True)
class Observed:
    """A value whose statistics are taken at run time (see fp8compile/observe/records.py).

    ``row`` is its line in what the graph returns, ``order`` its place among the graph's observed values.
    """

    name: str
    origin: Origin
    shape: str
    dtype: str
    kind: str  # "weight", "activation" or "data"
    direction: str  # "forward" or "backward"
    row: int
    order: int


@dataclass(frozen=True)
class Island:
    """Connected nodes computed in FP32 (``members``), or an operation left in 16 bit although it is unsafe in general.

    Attributes:
        name, origin: the first unsafe node.
        nodes: how many compute (no views or casts); ``products`` of them are matrix products.
        bytes_added: what their values are larger by in FP32; what one kernel keeps to itself moves nothing of it.
        reason: why it is, or would be, unsafe.
        members: the names of the nodes in the joint graph.
        left: why it was left; "" where it was widened.
    """

    name: str
    origin: Origin
    nodes: int
    products: int
    bytes_added: int
    reason: str
    members: tuple[str, ...] = ()
    left: str = ""


@dataclass(frozen=True)
class Notes:
    """What one pass did to one graph."""

    saved: tuple[Saved, ...] = ()
    skips: tuple[Skip, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    linears: tuple[Linear, ...] = ()
    observed: tuple[Observed, ...] = ()
    islands: tuple[Island, ...] = ()

    def __add__(self, other: Notes) -> Notes:
        return Notes(
            self.saved + other.saved,
            self.skips + other.skips,
            self.recomputed + other.recomputed,
            self.linears + other.linears,
            self.observed + other.observed,
            self.islands + other.islands,
        )
