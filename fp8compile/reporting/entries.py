"""What the passes did to a graph: an entry for each tensor, linear, island and observed value, and for each that was left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fp8compile.reporting.budget import Budget
from fp8compile.reporting.entry import Entry

# What a Skip is about.
SAVED, LINEAR, ISLAND, OBSERVED, RECIPE = "saved for backward", "linear", "FP32 island", "observed", "recipe"
COLLECTIVE, LOGITS, OFFLOAD = "collective", "logits", "offload"


@dataclass(frozen=True)
class SavedEntry(Entry):
    """A tensor that is saved for backward as codes.

    ``belongs_to`` is "input 3" or "output 0" where the caller has the tensor too (see fp8compile/compiler/saved_versions.py).
    ``is_operand`` means that an FP8 linear made the codes for its matmul, and these codes are saved as they are.
    """

    bytes_after: int
    codec: str
    belongs_to: str = ""
    is_operand: bool = False

    @property
    def bytes_before(self) -> int:
        """Bytes that the tensor itself would take."""
        return self.info.nbytes


@dataclass(frozen=True)
class Skip(Entry):
    """Something left as it was, and why.

    Attributes:
        reason: why.
        kind: what it is: ``SAVED``, ``LINEAR``, ``ISLAND``, ``OBSERVED``, ``COLLECTIVE``, ``LOGITS``, ``OFFLOAD``,
            or ``RECIPE``, a request without any effect.
        direction: for a linear's matmul, "forward", "dgrad" or "wgrad".
    """

    reason: str
    kind: str = SAVED
    direction: str = ""

    @property
    def bytes(self) -> int:
        """Bytes that stay alive for the backward because of it."""
        return self.info.nbytes if self.kind == SAVED else 0


@dataclass(frozen=True)
class Recomputed(Entry):
    """A tensor that plain Inductor saves and the backward now recomputes.

    ``sources`` are saved anyway, and the backward makes the tensor from them where it needs it. Where ``sources`` is empty,
    the min-cut found the way. ``for_budget``: it is made by matmuls or attention, for ``Recipe.memory.budget``.
    """

    sources: tuple[str, ...]
    for_budget: bool = False

    @property
    def bytes_before(self) -> int:
        """Bytes that it would take."""
        return self.info.nbytes


@dataclass(frozen=True)
class Linear(Entry):
    """A matmul ``[M, K] x [K, N]`` of a linear in FP8 or INT8, and the formats of its operands. A symbolic size is text.

    With ``Recipe.linears.mode = "auto"``, ``us`` and ``us_in_its_dtype`` are microseconds predicted for it: with its share of
    encodings, and in 16 bit; else 0.
    """

    direction: str  # "forward", "dgrad" or "wgrad"
    M: int | str
    K: int | str
    N: int | str
    formats: str
    us: float = 0.0
    us_in_its_dtype: float = 0.0


@dataclass(frozen=True)
class Operand(Entry):
    """An operand of FP8 matmuls whose scale is known before it (``Recipe.linears.scaling = "delayed"``).

    Attributes:
        info: the facts of the value; its origin is the first linear that reads it.
        role: "input", "weight" or "gradient".
        format: "e4m3" or "e5m2".
        row: its row in the scales that the graph takes.
        place: the row of its statistics in what the graph returns.
        statistics: how they are taken: along rows, or down blocks of rows; on a GPU why not, where a bias gradient is summed.
        order: how many operands its half of the graph makes before it.
    """

    role: str
    format: str
    row: int
    place: int
    statistics: str = "along rows"
    order: int = 0

    @property
    def label(self) -> str:
        """What state dicts and tables call it: ``layers.0.attn.q.input``."""
        return ".".join(part for part in (self.origin.module, self.role) if part)

    @property
    def place_of_row(self) -> tuple[int, int, str, str]:
        """What two graphs must agree on to share the operand's history."""
        return self.row, self.place, self.label, self.format


@dataclass(frozen=True)
class CachedWeight(Entry):
    """A weight whose codes come into the graph with its inputs (``Recipe.linears.cache_weights``).

    Attributes:
        info: the facts of the matrix that the codes stand for, in the dtype that the matmul takes it in.
        position: that of the weight among the Dynamo graph's inputs.
        by_rows: whether its codes are taken as they are, ``[N, K]``.
        transposed: whether they are taken as ``[K, N]``, stored row by row.
        packs: in which of the graph's packed inputs they are taken, transposed beside those of other weights.
    """

    position: int
    by_rows: bool
    transposed: bool
    packs: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that its codes hold beside the weight."""
        return (self.by_rows + self.transposed + len(self.packs)) * math.prod(int(size) for size in self.shape)


@dataclass(frozen=True)
class Observed(Entry):
    """A value whose statistics are taken at run time (see fp8compile/observe/records.py).

    ``row`` is its row in the statistics that the graph returns, ``order`` its place among the graph's observed values, and
    ``values`` the number of values that share the row.
    """

    kind: str  # "weight", "activation" or "data"
    direction: str  # "forward" or "backward"
    row: int
    order: int
    values: int = 1


@dataclass(frozen=True)
class Island(Entry):
    """Connected nodes that compute in FP32.

    Attributes:
        info: the facts of the first unsafe node.
        nodes: how many nodes compute (views and casts are not counted); ``matmuls`` of them are matmuls.
        bytes_added: by how many bytes their values are larger in FP32. Values inside one kernel move none of these bytes.
        reason: why it is unsafe.
        members: the names of the nodes in the joint graph.
    """

    nodes: int
    matmuls: int
    bytes_added: int
    reason: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Collective(Entry):
    """An exchange between ranks that carries codes; ``info`` is of one rank's tensor.

    Attributes:
        info: the facts of the tensor that one rank gives.
        operation: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: how many ranks take part.
        sent_plain: bytes that one rank sends in a ring, without codes.
        sent: bytes that one rank sends.
        codec: how they are encoded.
    """

    operation: str
    ranks: int
    sent_plain: int
    sent: int
    codec: str


@dataclass(frozen=True)
class Chunked(Entry):
    """Logits (``info``: as the model writes them) that are computed in chunks and never exist as a whole.

    Attributes:
        forward: chunks of rows in the forward.
        backward: chunks of columns in the backward; 0 for logits that take no gradient.
        bytes_after: bytes of the largest chunk. In the backward its gradient takes its place.
        form: the operations between the logits and their loss.
        members: the names in the joint graph of what is not computed as a whole.
        sums: chunks of rows in the backward, before those of columns: 0 where the gradient needs no sum over all columns.
    """

    forward: int
    backward: int
    bytes_after: int
    form: str
    members: tuple[str, ...] = ()
    sums: int = 0

    @property
    def bytes_before(self) -> int:
        """Bytes of the logits."""
        return self.info.nbytes


@dataclass(frozen=True)
class Offloaded(Entry):
    """Codes that wait for the backward in the host's memory (``Recipe.memory.offload``); ``info`` is of the codes.

    ``us`` are microseconds that a copy takes, each way, and ``waits_us`` those that the device waits for the two copies, both
    predicted for ``device``.
    """

    us: float
    waits_us: float
    device: str

    @property
    def bytes(self) -> int:
        """Bytes on the host."""
        return self.info.nbytes


@dataclass(frozen=True)
class Notes:
    """What one pass did to one graph."""

    saved: tuple[SavedEntry, ...] = ()
    skips: tuple[Skip, ...] = ()
    recomputed: tuple[Recomputed, ...] = ()
    linears: tuple[Linear, ...] = ()
    observed: tuple[Observed, ...] = ()
    islands: tuple[Island, ...] = ()
    collectives: tuple[Collective, ...] = ()
    operands: tuple[Operand, ...] = ()
    weights: tuple[CachedWeight, ...] = ()
    budgets: tuple[Budget, ...] = ()
    chunked: tuple[Chunked, ...] = ()
    offloaded: tuple[Offloaded, ...] = ()

    ENTRIES: ClassVar[Mapping[str, type[Entry]]] = {
        "saved": SavedEntry,
        "skips": Skip,
        "recomputed": Recomputed,
        "linears": Linear,
        "observed": Observed,
        "islands": Island,
        "collectives": Collective,
        "operands": Operand,
        "weights": CachedWeight,
        "chunked": Chunked,
        "offloaded": Offloaded,
    }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Notes:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON."""
        entries: dict[str, Any] = {n: tuple(map(kind.from_dict, data[n])) for n, kind in cls.ENTRIES.items()}
        return cls(**entries, budgets=tuple(map(Budget.from_dict, data["budgets"])))

    def moved(self, place: str) -> Notes:
        """These notes with module paths that begin at ``place``, a module path; "" leaves them as they are."""
        if not place:
            return self
        fields = dataclasses.fields(self)
        return Notes(*(tuple(entry.moved(place) for entry in getattr(self, f.name)) for f in fields))

    @property
    def bytes_of_codes(self) -> dict[str, int]:
        """By module, the bytes of codes that are kept of its weight; graphs of one model share them."""
        return {weight.origin.module: weight.bytes for weight in self.weights}

    def skipped(self, kind: str) -> tuple[Skip, ...]:
        """The skips of one kind."""
        return tuple(skip for skip in self.skips if skip.kind == kind)

    def __add__(self, other: Notes) -> Notes:
        return Notes(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)))
