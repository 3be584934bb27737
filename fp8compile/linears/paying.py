"""Which matmuls of linears are worth FP8 (``Recipe.linears.mode = "auto"``): by a prediction from sizes and a device's rates.

On a device without rates nothing is predicted, and every matmul that can be is in FP8: emulated on a CPU, or on a card that
this project knows nothing of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from torch.fx import Node

from fp8compile.analysis.linears import Matmul, uncast
from fp8compile.cost.device_rates import DeviceRates
from fp8compile.cost.linear_cost import LEAST_GAIN, LinearShape, Predicted, predicted, share_us
from fp8compile.fx.graph import size_hint
from fp8compile.fx.ops import DGRAD, FORWARD, WGRAD
from fp8compile.recipe.rates import rates_for
from fp8compile.recipe.recipe import Recipe


class Paying:
    """The matmuls of a graph, and for those of linears under "auto" whether FP8 pays."""

    def __init__(self, matmuls: Sequence[Matmul], recipe_of: Callable[[Matmul], Recipe]) -> None:
        of_linear: dict[Node, list[Matmul]] = defaultdict(list)
        for matmul in matmuls:
            of_linear[matmul.forward].append(matmul)
        reading = Counter(_input(found[0]) for found in of_linear.values())
        self._predicted: dict[Node, tuple[LinearShape, Predicted, DeviceRates]] = {}
        for forward, found in of_linear.items():
            recipe = recipe_of(found[0])
            rates = rates_for(forward.meta["val"].device, recipe) if recipe.linears.mode == "auto" else None
            if rates is not None:
                shape = _shape(found, reading[_input(found[0])], recipe)
                self._predicted[forward] = shape, predicted(shape, rates), rates

    def reason_to_leave(self, matmul: Matmul) -> str | None:
        """Why a matmul stays in 16 bit; None where FP8 pays, or where the recipe does not ask."""
        found = self._predicted.get(matmul.forward)
        if found is None:
            return None
        _, prediction, rates = found
        if matmul.direction in prediction.directions:
            return None
        times = f"{prediction.us_in_fp8:.3g} us with encodings, {prediction.us_in_its_dtype:.3g} us in its dtype"
        if prediction.directions:
            times += f", {prediction.us:.3g} us with {' and '.join(prediction.directions)} alone in FP8"
        elif prediction.us_in_fp8 < prediction.us_in_its_dtype:
            times += f", which saves less than {LEAST_GAIN:.0%}"
        return f"FP8 does not pay: {times} (predicted for {rates.name})"

    def figures(self, matmul: Matmul) -> tuple[float, float]:
        """Microseconds predicted for a matmul in FP8, its share of encodings included, and in its dtype; else zeros."""
        found = self._predicted.get(matmul.forward)
        if found is None:
            return 0.0, 0.0
        shape, prediction, rates = found
        chosen = (share_us(shape, matmul.direction, each, rates) for each in (prediction.directions, ()))
        return next(chosen), next(chosen)


def _input(forward: Matmul) -> Node:
    """What a linear's input is a view or a cast of: linears that read the same share its codes."""
    left, right = forward.operands
    return uncast(right if uncast(left) is forward.weight else left)


def _shape(matmuls: Sequence[Matmul], sharing: int, recipe: Recipe) -> LinearShape:
    first = matmuls[0]
    sizes = (size_hint(first.M), size_hint(first.K), size_hint(first.N))
    there = {matmul.direction for matmul in matmuls}
    directions = tuple(each for each in (FORWARD, DGRAD, WGRAD) if each in there)
    itemsize = first.forward.meta["val"].dtype.itemsize
    return LinearShape(*sizes, directions, sharing, recipe.linears.scaling, recipe.linears.cache_weights, itemsize)
