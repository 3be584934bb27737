"""How good the gradients of a recipe are: compared with those of an exact step, as ``fp8compile.check`` compares them.

Both run node by node, from the same random numbers. So it shows what the encoding does, and not what code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fp8compile.numerics.gradient_quality import error_powers
from fp8compile.recipe.recipe import Recipe, uncounted
from fp8compile.tools.checking.trials import Trials


class ExactStep:
    """The exact gradients, one set of them on the device, and the judge of others."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss: Callable[[Any], Tensor] | None,
        bar: float,
    ) -> None:
        self.bar = bar
        self.trials = Trials(model, args, kwargs, loss)
        try:
            values, self.judge = self.trials.judged(Recipe(), bar)
        except BaseException:
            self.close()
            raise
        self.gradients = {name: g for name, g in values.items() if name not in self.trials.outputs}

    @property
    def not_finite(self) -> tuple[str, ...]:
        """The gradients that the exact step itself has NaN or inf in: nothing can be compared with them."""
        return tuple(name for name in self.gradients if self.judge.powers.get(name) == float("inf"))

    def compared(self, recipe: Recipe) -> tuple[float, int]:
        """The worst SQNR in dB of the gradients that rounding does not decide, and how many gradients are below the bar."""
        errors = error_powers(self.gradients, self.trials.step(uncounted(recipe)).values)
        judged = [name for name in errors if self.judge.determined(name, self.bar) and name not in self.not_finite]
        worst = min((self.judge.sqnr(name, errors[name]) for name in judged), default=float("inf"))
        return worst, len(self.judge.failing(errors))

    def close(self) -> None:
        """Drop what was compiled for it, and the gradients."""
        self.trials.close()
        self.gradients = {}
