"""``fp8compile.tools.calibrate_bits``: what each saved value's codes add to the gradients' error, and bits for a budget.

    forward once  -->  backward on exact values: g;  then again for each value and format, with that value alone as it comes
                       back from its codes: g'

    weigh="norm"     error = sum_p |g'_p - g_p|^2 / max(|g_p|, |g| / 1000) / sum_p |g_p|      over parameters p
    weigh="power"    error = |g' - g|^2 / |g|^2                                               GACT's: all as one vector

Both are means of parameters' relative squared errors, weighted by the norm of their gradient or by its square. By the square
the largest gradients are all that counts, and small ones are given up: queries and keys of a Llama, which an optimizer that
scales each parameter's step makes as large as any. The floor keeps gradients that are zero up to rounding from deciding.

GACT (2206.11357) has no exact gradient: it runs the backward twice with different random roundings, and takes half of the
squared difference, which is the variance. Here the forward saves exact values while it is measured, so one backward gives
the error itself, with the part that is no noise. The graph runs node by node, so a value can be exchanged between the halves.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fp8compile import _torch as private
from fp8compile._messages import nearest
from fp8compile.compiler import report_store
from fp8compile.compiler.inductor import compile_once
from fp8compile.compiler.inline_regions import has_regions
from fp8compile.compiler.inputs import trains
from fp8compile.compiler.node_by_node import boxed, make_runnable
from fp8compile.fx.graph import TRIED
from fp8compile.numerics.few_bits import TOGETHER
from fp8compile.numerics.metrics import power
from fp8compile.passes.mark_saved import Tried
from fp8compile.recipe.recipe import Recipe, uncounted
from fp8compile.recipe.saved_bits import BITS, WHOLE, Key, SavedBits, SavedValue, checked_bits, checked_bytes
from fp8compile.tools.trial_step import (
    LIMIT,
    NOTHING_TO_DIFFERENTIATE,
    arguments,
    check_is_module,
    chosen_recipe,
    default_loss,
    left_as_it_was,
)

MEASURED = (2, 3, 4, 5, 6, 8)
WEIGHTS = ("norm", "power")
SMALLEST = 1e-3  # of the norm of all gradients: a parameter whose gradient is smaller counts as if it were so large
REGIONS = (
    "calibrate_bits: the model has nested compile regions, whose values it cannot exchange: leave "
    "torch.compiler.nested_compile_region out"
)
TOLD_APART = (
    "calibrate_bits: {0} is saved by several graphs of one batch, or by one graph that runs several times, and the bits of "
    "each cannot be told apart. Graph breaks make them: TORCH_LOGS=graph_breaks names each"
)
GROUPS = "calibrate_bits: saved.group_size={0}: codes of few bits need groups of a multiple of {1} elements"
NOTHING = (
    "calibrate_bits: nothing to choose: the recipe stores no value of this model as codes{why}. fp8compile.explain(model, "
    "batch) says of each saved value why it stays as it is"
)


def calibrate_bits(
    model: nn.Module,
    batches: Iterable[Any],
    bits: float | None = None,
    *,
    nbytes: int | None = None,
    recipe: Recipe | str | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    weigh: str = "norm",
    measured: Sequence[int] = MEASURED,
) -> Recipe:
    """A recipe with the bits for each saved value that make the error of the gradients least, within a budget of bytes.

    For each batch the forward runs once, and the backward once for each value and each number of bits. Attention's operands
    and result are measured and chosen too. Gradients, buffers and random number generators are left as they were; a model
    that is compiled goes on as it was.

        recipe = fp8compile.tools.calibrate_bits(model, batches, bits=4.0, loss=loss)
        print(recipe.saved.bits)  # what each value got, and what it costs
        model = torch.compile(model, backend="fp8compile", options={"recipe": recipe})

    Args:
        model: a module, compiled or not.
        batches: what the model is called with, a few times: each a tensor, a sequence of positional arguments or a mapping of
            keywords; data like that in training, after some steps of it.
        bits: the budget: the bytes that ``saved.format`` would take in so many bits for all, 2 ... 16; between two formats
            those in between. 4.0 where neither budget is given.
        nbytes: or the budget in bytes, for what is stored as codes of one batch.
        recipe: a Recipe, the name of a preset or a dict of fields; by default that of the running model, else the
            default recipe.
        loss: the scalar to differentiate, from the model's output; by default ``output.loss`` where there is one,
            else the sum of the floating-point outputs.
        weigh: what is made least: "norm", the mean of parameters' relative squared errors weighted by the norms of their
            gradients; or "power", the squared error of all gradients as one vector, as in GACT.
        measured: bits of 2, 3, 4, 5, 6, 8 that are measured, each a backward for each value. Others follow from the nearest:
            the error goes with the square of a code's step.

    Returns:
        The recipe with ``saved.bits``, a ``SavedBits``: ``saved.bits.within(bits=3.5)`` is the choice for another budget,
        ``saved.bits.save("bits.json")`` writes a file that ``Recipe.saved.bits`` takes.

    Raises:
        ValueError: no batches, no graph, nothing that is stored as codes, gradients that are zero or not finite, ``loss`` is
            not a scalar, a budget out of range or below what the fewest bits take; nested compile regions; a value that
            several graphs of one batch save, or one graph that runs several times.
    """
    check_is_module(model, "tools.calibrate_bits")
    if isinstance(batches, (Tensor, Mapping)):
        raise ValueError(
            f"calibrate_bits: batches is a {type(batches).__name__}; give a list of batches, if only of one: [batch]."
        )
    if bits is None and nbytes is None:
        bits = 4.0
    if bits is not None:
        checked_bits(bits)
    if nbytes is not None:
        checked_bytes(nbytes)
    if not measured or not set(measured) <= set(MEASURED):
        raise ValueError(
            f"calibrate_bits: measured must be some of {', '.join(map(str, MEASURED))}, not {measured!r}."
        )
    if weigh not in WEIGHTS:
        raise ValueError(f"calibrate_bits: weigh cannot be {weigh!r}.{nearest(str(weigh), WEIGHTS)}")
    chosen = chosen_recipe(recipe, model)
    for size in (each.saved.group_size for each in (chosen, *chosen.modules.values())):
        if size % TOGETHER:
            raise ValueError(GROUPS.format(size, TOGETHER))
    run = _BitErrors(_plain(chosen), tuple(measured), weigh)
    run.over(getattr(model, "_orig_mod", model), batches, loss)
    values = run.values()
    if not values:
        raise ValueError(
            NOTHING.format(why="" if chosen.rounds_saved else f": Recipe.saved is {chosen.saved.format!r}")
        )
    return chosen.replace_in_all({"saved.bits": SavedBits(values).within(bits, nbytes)})


def _plain(recipe: Recipe) -> Recipe:
    """``recipe`` with the same values saved, and nothing that a step hands to the next."""
    switches = {
        "linears.cache_weights": False,
        "linears.merge_dgrads": False,
        "linears.scaling": "dynamic",
        "memory.offload": "off",
    }
    return uncounted(recipe).replace_in_all({"saved.bits": "off", "memory": 1.0, **switches})


class _BitErrors:
    """The graphs of a model, and the error that each value and number of bits adds to its gradients, over all batches."""

    def __init__(self, recipe: Recipe, measured: Sequence[int], weigh: str) -> None:
        self.weigh, self.recipe, self.ways = weigh, recipe, {n for n, bits in BITS.items() if bits in measured}
        self.graphs: list[list[Tried]] = []
        self.errors: dict[Key, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.batches = 0
        self.has_regions = False
        self._met: list[Tried] = []  # in the backward on exact values that ran last
        self._active: tuple[Tried, str] | None = None

    def over(self, model: nn.Module, batches: Iterable[Any], loss: Callable[[Any], Tensor] | None) -> None:
        """Run every batch."""
        retained = private.functorch_config.patch(
            donated_buffer=False
        )  # several backwards read what one forward saved
        with left_as_it_was(model), retained, private.dynamo_config.patch(recompile_limit=LIMIT):
            step = torch.compile(model, backend=self._compile, dynamic=False)
            for self.batches, batch in enumerate(batches, 1):
                args, kwargs = arguments(batch, None, "calibrate_bits")
                output = step(*args, **kwargs)
                if self.has_regions:
                    raise ValueError(REGIONS)
                scalar = loss(output) if loss else default_loss(output)
                inputs = [t for t in (*model.parameters(), *pytree.tree_leaves((args, kwargs))) if trains(t)]
                self._measure(_checked(scalar), inputs)
        if not self.batches:
            raise ValueError("calibrate_bits: no batches. Give one at least, of data like that in training.")
        if not self.graphs:
            raise ValueError(f"fp8compile.tools.calibrate_bits: {report_store.NO_GRAPH_COMPILED}")

    def values(self) -> tuple[SavedValue, ...]:
        """What was measured, in the order of the graphs; a value of several graphs with the sizes of the largest."""
        largest: dict[Key, Tried] = {}
        for tried in (tried for graph in self.graphs for tried in graph):
            if tried.key not in largest or tried.numel > largest[tried.key].numel:
                largest[tried.key] = tried
        found = []
        for key, tried in largest.items():
            if key not in self.errors:
                continue  # no backward has read it: it is stored by the rule
            mean = {way: error / self.batches for way, error in self.errors[key].items()}
            found.append(SavedValue(key, tried.numel, tried.choices(_with_others(mean, tried.ways)), WHOLE))
        return tuple(found)

    def _measure(self, scalar: Tensor, inputs: Sequence[Tensor]) -> None:
        """The errors of one batch: one backward without codes, then one for each value and format."""

        def gradients() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(scalar, inputs, allow_unused=True, retain_graph=True)

        self._met, self._active = [], None
        exact = [None if g is None else g.double() for g in gradients()]
        met, seen = self._met, Counter(tried.key for tried in self._met)
        if several := [str(key) for key, times in seen.items() if times > 1]:
            raise ValueError(TOLD_APART.format(several[0]))
        powers = [0.0 if g is None else power(g) for g in exact]
        if not 0 < (norm := sum(powers)) < math.inf:
            raise ValueError(
                f"calibrate_bits: batch {self.batches - 1}: the squared norm of the gradients is {norm}, and nothing can be "
                "measured with it. fp8compile.tools.debug_step(model, batch) names what is not finite."
            )
        weights = _weights(powers, self.weigh)
        for tried in met:
            for way in self._ways_of(tried):
                self._active = tried, way
                each = zip(exact, gradients(), weights, strict=True)
                off = (w * power(g.double() - e) for e, g, w in each if e is not None and g is not None)
                self.errors[tried.key][way] += sum(off)
        self._active = None

    def _ways_of(self, tried: Tried) -> set[str]:
        """Those that are measured; the nearest one where it may have none of them."""
        asked = [BITS[way] for way in self.ways]
        near = min(tried.ways, key=lambda way: min(abs(BITS[way] - bits) for bits in asked))
        return (self.ways & tried.ways.keys()) or {near}

    def _compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found: list[Tried] = []
        self.graphs.append(found)
        self.has_regions |= has_regions(gm)

        def inner(half: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
            make_runnable(half)
            found.extend(node.meta[TRIED] for node in half.graph.nodes if TRIED in node.meta)
            return boxed(_Exchanging(half, self).run)

        return compile_once(gm, example_inputs, self.recipe, None, inner, measures_saved=True)[0]

    def came_in(self, tried: Tried, value: Tensor) -> Tensor:
        """A saved value as it comes into the backward that runs: itself, or from the codes that are measured now."""
        if self._active is None:
            self._met.append(tried)
        if self._active is None or self._active[0] is not tried:
            return value
        return tried.came_back(value, self._active[1])


class _Exchanging(Interpreter):
    """Runs one half of a graph, with values that are measured exchanged."""

    def __init__(self, gm: GraphModule, measuring: _BitErrors) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.measuring = measuring

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return self.measuring.came_in(n.meta[TRIED], result) if TRIED in n.meta else result


def _checked(scalar: Tensor | None) -> Tensor:
    if scalar is None or not scalar.requires_grad:
        raise ValueError(NOTHING_TO_DIFFERENTIATE.format("calibrate_bits"))
    if scalar.numel() != 1:
        raise ValueError(f"loss must return a scalar, not a tensor of shape {tuple(scalar.shape)}")
    return scalar


def _weights(powers: Sequence[float], weigh: str) -> list[float]:
    """What a unit of each gradient's squared error counts."""
    total = sum(powers)
    if weigh == "power":
        return [1 / total] * len(powers)
    norms = [math.sqrt(each) for each in powers]
    return [1 / (max(norm, SMALLEST * math.sqrt(total)) * sum(norms)) for norm in norms]


def _with_others(errors: Mapping[str, float], ways: Iterable[str]) -> dict[str, float]:
    """The errors of all ways; those that were not measured by the square of a code's step, from the nearest."""
    return {way: errors[way] if way in errors else _scaled(errors, way) for way in ways}


def _scaled(errors: Mapping[str, float], way: str) -> float:
    near = min(errors, key=lambda each: abs(BITS[each] - BITS[way]))
    steps: float = (2 ** BITS[near] - 1) / (2 ** BITS[way] - 1)
    return errors[near] * steps * steps
