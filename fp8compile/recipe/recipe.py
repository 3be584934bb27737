"""The recipe: a frozen value that says what is stored and computed in which format. Nothing else changes results."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fp8compile._messages import nearest
from fp8compile.recipe.effects import check_effects, judged
from fp8compile.recipe.frozen import FrozenModules
from fp8compile.recipe.modules import PER_GRAPH, check_modules, module_recipes
from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS, in_module
from fp8compile.recipe.presets import PRESETS
from fp8compile.recipe.validation import CONVERTED, FrozenOptions, check_values

OF_THE_DEVICE = "device"


@judged
@dataclass(frozen=True)
class Recipe:
    """What goes in which format. Frozen and hashable; equal recipes give the same compiled code and the same cache key.

    Attributes:
        linear: FP8 linears: "off", "tensorwise" (one scale per tensor), "rowwise" (one per row of an operand), "blockwise"
            (one per 1x128 of activations and gradients and per 128x128 of weights), "mxfp8" (a power of two per 1x32 of
            every operand; both need ``emulate=True``), or "auto" (tensorwise, where FP8 is predicted to pay: see
            docs/guide/linears.md). In INT8, for devices without FP8: "int8" (one per row), "int8_blocks" (one per 32x32 of
            every operand; ``emulate=True``).
        device_rates: the device whose rates decide what is "auto" in ``linear``, ``saved_attention``, ``offload``: "device"
            (the one that the graph runs on), "h100", "h200", "b200" or "mi300x" (fp8compile/planning/device_rates.py).
        linear_formats: "hybrid" (activations and weights E4M3, gradients E5M2), "e4m3" (all E4M3), or the gradient's format
            by matmul: {"dgrad": "e4m3", "wgrad": "e5m2"}. INT8 has one format.
        linear_scaling: where a tensorwise scale comes from: "dynamic" (from the tensor itself, before it is encoded) or
            "delayed" (from its amaxes in earlier steps; see docs/guide/delayed-scaling.md).
        amax_history_len: with "delayed", how many steps are looked back on, 1 ... 1024.
        amax_compute: with "delayed", "max" (the largest amax of the history) or "most_recent".
        margin: with "delayed", scales leave room for values 2**margin times as large, 0 ... 8.
        cache_weights: whether tensorwise weights of linears are encoded once for all calls between two changes of them,
            not in each call; see docs/guide/cached-weights.md for what it takes, and for what counts as a change.
        merge_dgrads: with "delayed" and ``cache_weights``, whether the gradient of what several linears read (q, k and v;
            gate and up) is one matmul; see docs/guide/merged-dgrads.md.
        smooth_swiglu: with tensorwise dynamic scales, whether outlier channels of silu(gate) * up give half of what they are
            larger to the next weight, before both are encoded; see docs/guide/linears.md.
        hadamard_wgrad: whether operands of wgrads in INT8 are turned by Hadamard matrices of 16 along the rows before they
            are encoded (HOT; fp8compile/numerics/hadamard.py).
        linear_skip: patterns as in ``skip``: linears that stay in their dtype; by default the places where libraries
            keep the output head. A linear tied to an embedding stays too.
        emulate: decode the codes and multiply in the model's dtype, on any device: FP8's numbers without its speed.
        saved: how what is saved for backward is stored: "groupwise" (one scale per group) or "off".
        saved_format: "auto" ("e4m3" for what the backward compares with zero and for what exp made, else "int8"; see
            fp8compile/encoding/saved_format.py), "e4m3", "int8", "best_of_two" (group by group, decided at run time), or
            "6bit" ... "2bit" where gradients are linear in the value, four at least where they are smooth, else as "auto"
            (fp8compile/encoding/bits_by_use.py).
        saved_bits: "off", or what ``fp8compile.tools.calibrate_bits`` chose for each saved value by measurement, or the path
            of the file that it was saved to; a value that is not in it goes by ``saved_format`` and ``attention_format``.
        group_size: elements of a row per scale at most, 16 ... 65536; of few bits a multiple of 8.
        collectives: what all_gather, reduce_scatter and all_reduce in the graph send: "off" (what they are given) or
            "groupwise" (codes; see passes/compress_collectives.py).
        chunk_logits: whether logits that only a loss reads are computed in chunks and never exist as a whole, for one more
            matmul of the output head, two with entropies (passes/chunk_logits.py): "off", "auto" (logits of 512 MiB and
            more, in chunks of 256 MiB), or the number of chunks, 2 ... 64, for logits of any size.
        saved_attention: whether operands and results of attention are encoded too: True, False, or "auto" (those of which
            that costs nothing, or less time than the bytes are worth; fp8compile/encoding/attention_cost.py).
        attention_format: the format of those. INT8 by default: the backward of attention exponentiates q k' again, which
            turns E4M3's relative error into a factor (measured on the demo: gradients of k at 10 dB, against 23 in INT8).
        memory_budget: what the peak of forward and backward may be, beside parameters: a fraction of the
            default recipe's peak, 1.0 ... 0.0, or bytes for each graph, an integer >= 2, or "fit": what a card of
            ``card_gib`` has left. Below the default's peak, matmuls and attention are computed again in the backward
            (passes/recompute_for_budget.py). In ``modules`` only 1.0, which keeps what is made there.
        card_gib: the memory of the device in GiB, for ``memory_budget="fit"``; without it of no effect. Leave out what the
            step does not own: the CUDA context takes about 0.5.
        offload: which codes saved for backward wait for it in pinned memory of the host: "off", "auto" (those whose copies
            the link is predicted to hide behind the graph, both ways), or "all" (those of 1 MiB and more, also where the
            device has to wait; passes/offload_codes.py).
        min_saved_numel: tensors with fewer elements stay as they are.
        skip: fnmatch patterns on module paths; tensors made in such a module, or in one under it, stay as they are.
        observe: whether statistics of values and gradients are taken in the graph, for ``fp8compile.amp.LossScaler`` and
            ``fp8compile.tools.overflow_report``: "auto" (what is FP16 in a training graph), True (BF16 and FP32 too), False.
        islands: what runs in FP32 in a 16-bit graph because it may leave FP16's range (passes/widen_unsafe_ops.py): "auto"
            (FP16 operations known for it, unless they are proven to fit), "policy" (these operations in FP16 and BF16, as
            AMP does), "off", or what ``fp8compile.calibrate`` measured, or the path of the file it was saved to.
        keep_fp32: what runs in FP32 in any case: patterns on modules as in ``skip``, or on operations: "aten.exp".
        modules: other recipes for some modules: patterns as in ``skip``, each with a Recipe, the name of a preset, or a
            dict of changes to this recipe. The first pattern that matches decides. What is one for the whole graph
            (``codegen``, ``inductor``, ``dump``, ``check``) cannot differ; a pass that has to decide for the graph as a
            whole runs if any module asks for it.
        codegen: "inductor", or "eager": the same rewritten graph, run node by node (tests, debugging).
        inductor: options handed to Inductor, as in ``torch.compile(options=...)``.
        dump: folder for graph dumps; by default FP8COMPILE_DUMP, where that is set. Never changes what is compiled or cached.
        check: "first_step": compare the gradients of the first training step with those of an exact one beside it, and
            warn by name of each that is off (fp8compile/compiler/first_step.py); "off". Like ``dump`` it looks on: it
            changes no code that is compiled, so it is no part of what makes recipes equal, nor of cache keys.
    """

    linear: str = "auto"
    device_rates: str = "device"
    linear_formats: str | Mapping[str, str] = "hybrid"
    linear_scaling: str = "dynamic"
    amax_history_len: int = 16
    amax_compute: str = "max"
    margin: int = 1
    cache_weights: bool = False
    merge_dgrads: bool = False
    smooth_swiglu: bool = False
    hadamard_wgrad: bool = False
    linear_skip: tuple[str, ...] = OUTPUT_HEAD_PATTERNS
    emulate: bool = False
    saved: str = "groupwise"
    saved_format: str = "auto"
    saved_bits: Any = "off"
    group_size: int = 128
    collectives: str = "off"
    chunk_logits: str | int = "off"
    saved_attention: bool | str = True
    attention_format: str = "int8"
    memory_budget: float | int | str = 1.0
    card_gib: float | None = None
    offload: str = "off"
    min_saved_numel: int = 4096
    skip: tuple[str, ...] = ()
    observe: str | bool = "auto"
    islands: Any = "auto"
    keep_fp32: tuple[str, ...] = ()
    modules: Mapping[str, Any] = FrozenModules()
    codegen: str = "inductor"
    inductor: Mapping[str, Any] = FrozenOptions()
    dump: str | None = field(default=None, compare=False)
    check: str = field(default="off", compare=False)

    def __post_init__(self) -> None:
        for name, converted in CONVERTED.items():
            object.__setattr__(self, name, converted(name, getattr(self, name)))
        check_values(self)
        object.__setattr__(self, "modules", module_recipes(self.modules, self))
        check_modules(self)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Recipe:
        """The recipe called ``name`` ("default", "conservative", ...) with ``changes`` to single fields.

        Raises:
            ValueError: no such preset or field, or a value it cannot have; the message names the nearest right one.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"fp8compile has no preset {name!r}.{nearest(str(name), PRESETS)}")
        _known(changes)
        found = dataclasses.replace(cls(), **{**PRESETS[name], **changes})
        check_effects(found, changes)
        return found

    @classmethod
    def resolve(cls, value: Any, base: Recipe) -> Recipe:
        """The recipe that ``value`` stands for: itself, the name of a preset, or a dict of changes to ``base``."""
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, Mapping):
            if "preset" in value:
                return cls.from_options(value)
            _known(value)
            found = dataclasses.replace(base, **value)
            check_effects(found, value)
            return found
        if not isinstance(value, cls):
            raise ValueError(f"A recipe is a Recipe, the name of a preset or a dict of its fields, not {value!r}.")
        return value

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None) -> Recipe:
        """The recipe that ``torch.compile(..., options=...)`` describes: ``recipe``, or ``preset`` plus fields of Recipe."""
        options = dict(options or {})
        if "recipe" in options:
            if others := sorted(options.keys() - {"recipe"}):
                raise ValueError(
                    f"options['recipe'] is the whole recipe and stands alone; put {', '.join(others)} into it: "
                    f"dataclasses.replace(recipe, ...)."
                )
            return cls.resolve(options["recipe"], cls())
        return cls.preset(options.pop("preset", "default"), **options)

    @property
    def key(self) -> str:
        """A stable name for everything that changes compiled code (so: all fields but ``dump`` and ``check``)."""
        values = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if f.compare]
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    def at(self, *spellings: str) -> Recipe:
        """The recipe in force in the module at a path; a module of a larger model may be named in several ways."""
        for pattern, recipe in self.modules.items():
            if any(in_module(path, pattern) for path in spellings):
                own = {name: getattr(self, name) for name in PER_GRAPH}
                found: Recipe = dataclasses.replace(recipe, **own)
                return found
        return self

    def replace_in_all(self, **changes: Any) -> Recipe:
        """This recipe with ``changes`` in every module."""
        modules = {pattern: dataclasses.replace(recipe, **changes) for pattern, recipe in self.modules.items()}
        return dataclasses.replace(self, modules=modules, **changes)

    @property
    def as_compiled(self) -> Recipe:
        """This recipe without the fields that only observe: the same for all recipes equal to it, also as a pickle."""
        return dataclasses.replace(self, dump=None, check="off")

    @property
    def stores_saved(self) -> bool:
        """Whether tensors are stored as codes in any module."""
        return any(recipe.saved != "off" for recipe in (self, *self.modules.values()))

    @property
    def quantizes_linears(self) -> bool:
        """Whether linears are to be FP8 in any module."""
        return any(recipe.linear != "off" for recipe in (self, *self.modules.values()))

    @property
    def scaling_mode(self) -> str:
        """``linear``, where "auto" is tensorwise too, and "int8" rowwise."""
        return {"auto": "tensorwise", "int8": "rowwise"}.get(self.linear, self.linear)

    @property
    def delays_scales(self) -> bool:
        """Whether scales of linears are to be known before their tensors in any module."""
        return any(r.linear != "off" and r.linear_scaling == "delayed" for r in (self, *self.modules.values()))

    @property
    def caches_weights(self) -> bool:
        """Whether codes of weights come in with the inputs in any module."""
        return any(r.scaling_mode == "tensorwise" and r.cache_weights for r in (self, *self.modules.values()))

    @property
    def merges_dgrads(self) -> bool:
        """Whether dgrads of linears that read one input are one matmul in any module."""
        asked = any(r.merge_dgrads for r in (self, *self.modules.values()))
        return asked and self.delays_scales and self.caches_weights

    @property
    def compresses_collectives(self) -> bool:
        """Whether collectives are to carry codes in any module."""
        return any(recipe.collectives != "off" for recipe in (self, *self.modules.values()))

    @property
    def limits_memory(self) -> bool:
        """Whether the peak of a graph has to stay within a budget."""
        return self.memory_budget != 1

    @property
    def offloads(self) -> bool:
        """Whether codes are to wait on the host in any module."""
        return any(recipe.offload != "off" for recipe in (self, *self.modules.values()))

    @property
    def names_modules(self) -> bool:
        """Whether it says something of modules by their paths, beyond where heads are by default."""
        recipes = (self, *self.modules.values())
        by_path = any(r.skip or r.keep_fp32 or r.linear_skip != OUTPUT_HEAD_PATTERNS for r in recipes)
        return bool(self.modules) or by_path or self.saved_bits != "off"

    @property
    def rewrites_graph(self) -> bool:
        """Whether linears, collectives or what is saved are rewritten in any module."""
        return self.limits_memory or self.stores_saved or self.quantizes_linears or self.compresses_collectives

    def __str__(self) -> str:
        """What differs from the default recipe; then, one line for each pattern, what differs in its modules."""
        fields = [f for f in dataclasses.fields(self) if f.name != "modules"]
        own = [f.name for f in fields if getattr(self, f.name) != f.default]
        text = f"Recipe({', '.join(f'{name}={getattr(self, name)!r}' for name in own)})"
        for pattern, recipe in self.modules.items():
            other = [f.name for f in fields if f.name not in PER_GRAPH]
            other = [name for name in other if getattr(recipe, name) != getattr(self, name)]
            text += f"\n  in {pattern}: {', '.join(f'{n}={getattr(recipe, n)!r}' for n in other) or 'the same'}"
        return text


_FIELDS = frozenset(f.name for f in dataclasses.fields(Recipe))


def _known(changes: Mapping[str, Any]) -> None:
    for unknown in changes.keys() - _FIELDS:
        raise ValueError(f"Recipe has no field {unknown!r}.{nearest(unknown, [*_FIELDS, 'preset', 'recipe'])}")


def exact(recipe: Recipe) -> Recipe:
    """``recipe`` with nothing encoded. FP32 islands stay, since they are more accurate than what they replace."""
    switches = dict.fromkeys(("cache_weights", "merge_dgrads", "smooth_swiglu", "hadamard_wgrad"), False)
    linears = {"linear": "off", "linear_scaling": "dynamic", **switches}
    return uncounted(recipe).replace_in_all(saved="off", collectives="off", offload="off", **linears)


def uncounted(recipe: Recipe) -> Recipe:
    """``recipe`` as it computes: without statistics, dumps and checks, which change no value."""
    return recipe.replace_in_all(observe=False).as_compiled
