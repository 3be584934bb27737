"""The recipe: a frozen value that says what is stored and computed in which format. Nothing else changes results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from fp8compile._messages import nearest
from fp8compile.recipe.changes import FIELDS, LOOK_ON, TOP, as_written, changed_group, single
from fp8compile.recipe.effects import check_effects
from fp8compile.recipe.frozen import FrozenModules
from fp8compile.recipe.groups import GROUPS, Debug, Fp32, Linears, Memory, Saved
from fp8compile.recipe.modules import PER_GRAPH, check_modules, module_recipes
from fp8compile.recipe.patterns import OUTPUT_HEAD_PATTERNS, in_module
from fp8compile.recipe.presets import PRESETS
from fp8compile.recipe.validation import as_patterns, check_fields

OF_THE_DEVICE = "device"


# What a recipe is by default; groups are frozen.
_LINEARS, _SAVED, _MEMORY, _FP32, _DEBUG, _MODULES = Linears(), Saved(), Memory(), Fp32(), Debug(), FrozenModules()


@dataclass(frozen=True, init=False)
class Recipe:
    """What goes in which format. Frozen and hashable; equal recipes give the same compiled code and the same cache key.

        Recipe(linears="delayed", saved={"format": "4bit", "group_size": 64}, modules={"layers.0": "off"})

    A group is written as a dict of its fields, or as the value that stands for it. Single fields may be written by dotted
    names, in ``torch.compile(options=...)`` above all: {"linears": "rowwise", "saved.min_numel": 0}.

    Attributes:
        linears: which linears multiply codes, of which format, under which scales: a mode, "delayed", or fields of
            ``Linears`` (fp8compile/recipe/groups.py).
        saved: how what is saved for the backward is stored: a format, "off", or fields of ``Saved``.
        memory: what the peak may be, and what is done for it: a budget, or fields of ``Memory``.
        fp32: what guards the range of 16-bit dtypes: the kind of islands, or fields of ``Fp32``.
        modules: other recipes for some modules: patterns as in ``skip``, each with a Recipe, the name of a preset, or a
            dict of changes to this recipe. The first pattern that matches decides. What is one for the whole graph
            (``debug``, amax histories) cannot differ; a pass that has to decide for the graph as a whole runs if any module
            asks for it.
        skip: fnmatch patterns on module paths; tensors made in such a module, or in one under it, stay as they are.
        collectives: what all_gather, reduce_scatter and all_reduce in the graph send: "off" (what they are given) or
            "groupwise" (codes; see passes/compress_collectives.py).
        debug: how it is compiled, and what looks on: fields of ``Debug``.
    """

    linears: Linears = _LINEARS
    saved: Saved = _SAVED
    memory: Memory = _MEMORY
    fp32: Fp32 = _FP32
    modules: Mapping[str, Any] = _MODULES
    skip: tuple[str, ...] = ()
    collectives: str = "off"
    debug: Debug = _DEBUG

    def __init__(
        self,
        linears: Linears | Mapping[str, Any] | str = _LINEARS,
        saved: Saved | Mapping[str, Any] | str = _SAVED,
        memory: Memory | Mapping[str, Any] | float | str = _MEMORY,
        fp32: Fp32 | Mapping[str, Any] | Any = _FP32,
        modules: Mapping[str, Any] = _MODULES,
        skip: tuple[str, ...] | list[str] | str = (),
        collectives: str = "off",
        debug: Debug | Mapping[str, Any] = _DEBUG,
        **dotted: Any,
    ) -> None:
        """A recipe; ``dotted`` are single fields of groups, as ``**{"saved.min_numel": 0}``.

        Raises:
            ValueError: a field that does not exist, a value that it cannot have, or one that has no effect beside the
                others; the message names the nearest right one, or what to set.
        """
        given = {"linears": linears, "saved": saved, "memory": memory, "fp32": fp32, "debug": debug}
        whole: dict[str, Any] = {name: group for name, group in given.items() if isinstance(group, GROUPS[name])}
        written = single({name: value for name, value in given.items() if name not in whole} | dotted)
        for name in GROUPS:
            object.__setattr__(self, name, changed_group(whole.get(name, getattr(Recipe, name)), written))
        object.__setattr__(self, "skip", as_patterns("skip", skip))
        object.__setattr__(self, "collectives", collectives)
        check_fields("", {"collectives": collectives})
        object.__setattr__(self, "modules", module_recipes(modules, self))
        check_modules(self)
        check_effects(self, written)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Recipe:
        """The recipe called ``name`` ("default", "speed", ...) with ``changes``, written as for the constructor.

        Raises:
            ValueError: no such preset or field, or a value it cannot have; the message names the nearest right one.
        """
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"fp8compile has no preset {name!r}.{nearest(str(name), PRESETS)}")
        written = single(changes)
        found = cls().changed({**single(PRESETS[name]), **written})
        check_effects(found, written)
        return found

    @classmethod
    def resolve(cls, value: Any, base: Recipe) -> Recipe:
        """The recipe that ``value`` stands for: itself, the name of a preset, or a dict of changes to ``base``."""
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, Mapping):
            if "preset" in value:
                return cls.from_options(value)
            written = single(value)
            found = base.changed(written)
            check_effects(found, written)
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
                    f"recipe.changed({{...}})."
                )
            return cls.resolve(options["recipe"], cls())
        return cls.preset(options.pop("preset", "default"), **options)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """This recipe with ``changes``, written as for the constructor; other fields stay, with an effect or without."""
        written = single(changes)
        fields: dict[str, Any] = {name: changed_group(getattr(self, name), written) for name in GROUPS}
        return Recipe(**fields, **{name: written.get(name, getattr(self, name)) for name in TOP})

    def get(self, name: str) -> Any:
        """A field by its dotted name."""
        group, _, field = name.partition(".")
        return getattr(getattr(self, group), field) if field else getattr(self, group)

    def differences(self, base: Recipe) -> dict[str, Any]:
        """The changes that make this recipe of ``base``, as people write them; without ``modules``."""
        names = [*FIELDS, *(name for name in TOP if name != "modules")]
        return as_written({name: self.get(name) for name in names if self.get(name) != base.get(name)})

    @property
    def key(self) -> str:
        """A stable name for everything that changes compiled code: all fields but those that look on."""
        values = [(name, self.get(name)) for name in (*FIELDS, *TOP) if name not in LOOK_ON]
        return hashlib.sha256(repr(values).encode()).hexdigest()[:16]

    @property
    def per_graph(self) -> dict[str, Any]:
        """The fields that are one for all modules, as changes to a module's recipe."""
        return {name: self.get(name) for name in PER_GRAPH}

    def at(self, *spellings: str) -> Recipe:
        """The recipe in force in the module at a path; a module of a larger model may be named in several ways."""
        for pattern, recipe in self.modules.items():
            if any(in_module(path, pattern) for path in spellings):
                return cast(Recipe, recipe.changed(self.per_graph))
        return self

    def replace_in_all(self, changes: Mapping[str, Any]) -> Recipe:
        """This recipe with ``changes`` in every module."""
        modules = {pattern: recipe.changed(changes) for pattern, recipe in self.modules.items()}
        return self.changed({**changes, "modules": modules})

    @property
    def as_compiled(self) -> Recipe:
        """This recipe without the fields that only observe: the same for all recipes equal to it, also as a pickle."""
        return self.changed({name: FIELDS[name] for name in LOOK_ON})

    @property
    def stores_saved(self) -> bool:
        """Whether what is saved is stored in fewer bytes in any module, with an error or without."""
        return any(recipe.saved.format != "off" for recipe in (self, *self.modules.values()))

    @property
    def rounds_saved(self) -> bool:
        """Whether what is saved is stored as codes in any module."""
        return any(recipe.saved.rounds for recipe in (self, *self.modules.values()))

    @property
    def quantizes_linears(self) -> bool:
        """Whether linears are to be FP8 in any module."""
        return any(recipe.linears.mode != "off" for recipe in (self, *self.modules.values()))

    @property
    def scaling_mode(self) -> str:
        """The mode of linears, where "auto" is tensorwise too, and "int8" rowwise."""
        return {"auto": "tensorwise", "int8": "rowwise"}.get(self.linears.mode, self.linears.mode)

    @property
    def delays_scales(self) -> bool:
        """Whether scales of linears are to be known before their tensors in any module."""
        return any(r.linears.mode != "off" and r.linears.scaling == "delayed" for r in (self, *self.modules.values()))

    @property
    def caches_weights(self) -> bool:
        """Whether codes of weights come in with the inputs in any module."""
        return any(r.scaling_mode == "tensorwise" and r.linears.cache_weights for r in (self, *self.modules.values()))

    @property
    def merges_dgrads(self) -> bool:
        """Whether dgrads of linears that read one input are one matmul in any module."""
        asked = any(r.linears.merge_dgrads for r in (self, *self.modules.values()))
        return asked and self.delays_scales and self.caches_weights

    @property
    def compresses_collectives(self) -> bool:
        """Whether collectives are to carry codes in any module."""
        return any(recipe.collectives != "off" for recipe in (self, *self.modules.values()))

    @property
    def limits_memory(self) -> bool:
        """Whether the peak of a graph has to stay within a budget."""
        return self.memory.budget != 1

    @property
    def asks_for_memory(self) -> bool:
        """Whether bytes come before time: a budget, an offload, or codes that were chosen for what is saved."""
        saved = self.saved
        chosen = saved.bits != FIELDS["saved.bits"] or saved.format not in ("off", FIELDS["saved.format"])
        return self.limits_memory or self.memory.offload != "off" or chosen

    @property
    def offloads(self) -> bool:
        """Whether codes are to wait on the host in any module."""
        return any(recipe.memory.offload != "off" for recipe in (self, *self.modules.values()))

    @property
    def names_modules(self) -> bool:
        """Whether it says something of modules by their paths, beyond where heads are by default."""
        recipes = (self, *self.modules.values())
        by_path = any(r.skip or r.fp32.keep or r.linears.skip != OUTPUT_HEAD_PATTERNS for r in recipes)
        return bool(self.modules) or by_path or self.saved.bits != "off"

    @property
    def rewrites_graph(self) -> bool:
        """Whether linears, collectives or what is saved are rewritten in any module."""
        return self.limits_memory or self.stores_saved or self.quantizes_linears or self.compresses_collectives

    def __str__(self) -> str:
        """What differs from the default recipe; then, one line for each pattern, what differs in its modules."""
        text = f"Recipe({_written(self.differences(Recipe()))})"
        for pattern, recipe in self.modules.items():
            here = recipe.changed(self.per_graph).differences(self)
            text += f"\n  in {pattern}: {_written(here) or 'the same'}"
        return text


def _written(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in changes.items())


def exact(recipe: Recipe) -> Recipe:
    """``recipe`` with nothing encoded. FP32 islands stay, since they are more accurate than what they replace."""
    switches = dict.fromkeys(("cache_weights", "merge_dgrads", "smooth_swiglu"), False)
    linears = {"mode": "off", "scaling": "dynamic", **switches}
    changes = {"linears": linears, "saved": "off", "collectives": "off", "memory.offload": "off"}
    return uncounted(recipe).replace_in_all(changes)


def uncounted(recipe: Recipe) -> Recipe:
    """``recipe`` as it computes: without statistics, dumps and checks, which change no value."""
    return recipe.replace_in_all({"fp32.observe": False}).as_compiled
