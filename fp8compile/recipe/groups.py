"""The groups of a recipe: what belongs together stands together. Each is frozen, hashable, and judges its own values.

A group may be written as a dict of its fields, and its most wanted field as that field's value alone:

    linears="delayed"     saved="4bit"     memory=0.5     fp32="policy"     saved={"format": "4bit", "group_size": 64}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS
from fp8compile.recipe.validation import (
    CONVERTED,
    FrozenOptions,
    check_budget,
    check_few_bits,
    check_fields,
    check_scales,
)


@dataclass(frozen=True)
class Group:
    """Fields of a recipe; ``NAME`` is the recipe's field that holds them, ``SHORT`` the field that a plain value is for."""

    NAME: ClassVar[str]
    SHORT: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            name = f"{self.NAME}.{each.name}"
            if name in CONVERTED:
                object.__setattr__(self, each.name, CONVERTED[name](name, getattr(self, each.name)))
        check_fields(self.NAME, vars(self))


@dataclass(frozen=True)
class Linears(Group):
    """Which linears multiply codes, of which format, under which scales.

    Attributes:
        mode: "off"; in FP8 "tensorwise" (one scale per tensor), "rowwise" (one per row of an operand), "blockwise" (one per
            1x128 of activations and gradients and per 128x128 of weights), "mxfp8" (a power of two per 1x32 of every
            operand; both need ``emulate=True``), or "auto" (tensorwise, where FP8 is predicted to pay: see
            docs/guide/linears.md). In INT8, for devices without FP8: "int8" (one per row).
        formats: "hybrid" (activations and weights E4M3, gradients E5M2), "e4m3" (all E4M3), or the gradient's format by
            matmul: {"dgrad": "e4m3", "wgrad": "e5m2"}. INT8 has one format.
        scaling: where a tensorwise scale comes from: "dynamic" (from the tensor itself, before it is encoded) or "delayed"
            (from its amaxes in earlier steps; see docs/guide/delayed-scaling.md).
        amax_history_len: with "delayed", of how many steps the largest amax counts, 1 (the most recent) ... 1024.
        margin: with "delayed", scales leave room for values 2**margin times as large, 0 ... 8.
        cache_weights: whether tensorwise weights of linears are encoded once for all calls between two changes of them,
            not in each call; see docs/guide/cached-weights.md for what it takes, and for what counts as a change.
        merge_dgrads: with "delayed" and ``cache_weights``, whether the gradient of what several linears read (q, k and v;
            gate and up) is one matmul; see docs/guide/merged-dgrads.md.
        smooth_swiglu: with tensorwise dynamic scales, whether outlier channels of silu(gate) * up give half of what they are
            larger to the next weight, before both are encoded; see docs/guide/linears.md.
        skip: patterns as in ``Recipe.skip``: linears that stay in their dtype; by default the places where libraries keep
            the output head. A linear tied to an embedding stays too.
        emulate: decode the codes and multiply in the model's dtype, on any device: FP8's numbers without its speed.
    """

    NAME: ClassVar[str] = "linears"
    SHORT: ClassVar[str | None] = "mode"

    mode: str = "auto"
    formats: str | Mapping[str, str] = "hybrid"
    scaling: str = "dynamic"
    amax_history_len: int = 16
    margin: int = 1
    cache_weights: bool = False
    merge_dgrads: bool = False
    smooth_swiglu: bool = False
    skip: tuple[str, ...] = OUTPUT_HEAD_PATTERNS
    emulate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scales(self.mode, self.scaling, self.cache_weights)


@dataclass(frozen=True)
class Saved(Group):
    """How what is saved for the backward is stored.

    Attributes:
        format: "off"; "exact" (only what fewer bytes hold without an error: masks as bits, small integers); or codes with
            one scale per group: "auto" ("e4m3" for what the backward compares with zero and for what exp made, else "int8";
            see fp8compile/saved/format.py), "e4m3", "int8", or "6bit" ... "2bit" where gradients are linear in the
            value, four at least where they are smooth, else as "auto" (fp8compile/saved/bits_by_use.py).
        bits: "off", or what ``fp8compile.tools.calibrate_bits`` chose for each saved value by measurement, or the path of
            the file that it was saved to; a value that is not in it goes by ``format`` and ``attention_format``.
        group_size: elements of a row per scale at most, 16 ... 65536; of few bits a multiple of 8.
        max_cost: what the codes of a value may cost: "any", or a share, 0.0 or more, of the time in which the product that
            made it would make as many bytes again, both predicted (fp8compile/saved/price.py). 0.0 stores what takes no
            time. What costs more stays as it is. "auto" is 1.0 on a device whose rates are known, with a limit for all values
            (fp8compile/saved/allowance.py), and "any" on others and where memory is asked for: by checkpointing, or
            by a ``memory.budget``, ``memory.offload``, ``format`` or ``bits`` of the recipe's own. Where nothing is stored as
            codes, it says what the backward of FP8 linears may make again.
        attention: whether operands and results of attention are encoded too.
        attention_format: the format of those. INT8 by default: the backward of attention exponentiates q k' again, which
            turns E4M3's relative error into a factor (measured on the demo: gradients of k at 10 dB, against 23 in INT8).
        min_numel: tensors with fewer elements stay as they are.
    """

    NAME: ClassVar[str] = "saved"
    SHORT: ClassVar[str | None] = "format"

    format: str = "auto"
    bits: Any = "off"
    group_size: int = 128
    max_cost: float | str = "auto"
    attention: bool = True
    attention_format: str = "int8"
    min_numel: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_few_bits(self.group_size, (self.format, self.attention_format), self.bits)

    @property
    def rounds(self) -> bool:
        """Whether values are stored as codes, which round them."""
        return self.format not in ("off", "exact")


@dataclass(frozen=True)
class Memory(Group):
    """What the peak of a step may be, and what is done to reach it.

    Attributes:
        budget: what the peak of forward and backward may be, beside parameters: a fraction of the default recipe's peak,
            1.0 ... 0.0, or bytes for each graph, an integer >= 2, or "fit": what a card of ``card_gib`` has left. Below
            the default's peak, matmuls and attention are computed again in the backward (passes/recompute_for_budget.py).
            In ``modules`` only 1.0, which keeps what is made there.
        card_gib: the memory of the device in GiB, for ``budget="fit"``; without it of no effect. Leave out what the step
            does not own: the CUDA context takes about 0.5.
        offload: which codes saved for backward wait for it in pinned memory of the host: "off", "auto" (those whose copies
            the link is predicted to hide behind the graph, both ways), or "all" (those of 1 MiB and more, also where the
            device has to wait; passes/offload_codes.py).
        chunk_logits: whether logits that only a loss reads are computed in chunks and never exist as a whole, for one more
            matmul of the output head, two with entropies (passes/chunk_logits.py): "off", "auto" (logits of 512 MiB and
            more, in chunks of 256 MiB), or the number of chunks, 2 ... 64, for logits of any size.
    """

    NAME: ClassVar[str] = "memory"
    SHORT: ClassVar[str | None] = "budget"

    budget: float | int | str = 1.0
    card_gib: float | None = None
    offload: str = "off"
    chunk_logits: str | int = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.card_gib)


@dataclass(frozen=True)
class Fp32(Group):
    """What guards the range of 16-bit dtypes.

    Attributes:
        islands: what runs in FP32 in a 16-bit graph because it may leave FP16's range (passes/widen_unsafe_ops.py): "auto"
            (FP16 operations known for it, unless they are proven to fit), "policy" (these operations in FP16 and BF16, as
            AMP does), "off", or what ``fp8compile.calibrate`` measured, or the path of the file it was saved to.
        keep: what runs in FP32 in any case: patterns on modules as in ``Recipe.skip``, or on operations: "aten.exp".
        observe: whether statistics of values and gradients are taken in the graph, for ``fp8compile.amp.LossScaler`` and
            ``fp8compile.tools.overflow_report``: "auto" (what is FP16 in a training graph), True (BF16 and FP32 too), False.
    """

    NAME: ClassVar[str] = "fp32"
    SHORT: ClassVar[str | None] = "islands"

    islands: Any = "auto"
    keep: tuple[str, ...] = ()
    observe: str | bool = "auto"


@dataclass(frozen=True)
class Debug(Group):
    """How it is compiled, and what looks on.

    Attributes:
        codegen: "inductor", or "eager": the same rewritten graph, run node by node (tests, debugging).
        inductor: options handed to Inductor, as in ``torch.compile(options=...)``.
        dump: folder for graph dumps; by default FP8COMPILE_DUMP, where that is set. Never changes what is compiled or cached.
        check: "first_step": compare the gradients of the first training step with those of an exact one beside it, and
            warn by name of each that is off (fp8compile/compiler/first_step.py); "off". Like ``dump`` it looks on: it
            changes no code that is compiled, so it is no part of what makes recipes equal, nor of cache keys.
        device_rates: the device whose rates decide what is "auto" in ``linears.mode``, what ``saved.max_cost`` leaves, and
            ``memory.offload``: "device" (the one that the graph runs on), "h100", "h200", "b200" or "mi300x"
            (fp8compile/cost/device_rates.py).
    """

    NAME: ClassVar[str] = "debug"

    codegen: str = "inductor"
    inductor: Mapping[str, Any] = FrozenOptions()
    dump: str | None = field(default=None, compare=False)
    check: str = field(default="off", compare=False)
    device_rates: str = "device"


GROUPS: Mapping[str, type[Group]] = {each.NAME: each for each in (Linears, Saved, Memory, Fp32, Debug)}
# Values that stand alone for another field than ``SHORT``.
OF_ANOTHER: Mapping[tuple[str, Any], str] = {("linears", "delayed"): "scaling"}
