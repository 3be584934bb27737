"""Is a random program's gradient right where everything eligible is stored in one byte?

    propagated   in float64, |g' - g| of every element of every gradient beside the analysis' own bound
                 (tests/support/running_error.py): the codes are the only difference, an excess is a wrong entry in the
                 allow-list
    compiled     gradients of the compiled program against eager float64: finite; off by no more than those codes made it in
                 the simulation, doubled for codes that fall on the other side of a rounding, beside the dtype's own error

The second is asked of FP32 programs; of BF16 ones, that gradients are finite. Beside a kink (a clamp's edge, which BF16 hits
exactly) one element that goes the other way can be most of a gradient, in eager too, and simulation and program do not turn
the same ones.

The bound of a comparison says that elements near its edge may be either: it is met where every element is at an edge, as in
x == amax(x). So the error of a gradient must be LEAST_DB under what its terms amount to before they cancel
(tests/support/magnitudes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.reference import sqnr_db
from tests.support.running_error import outcome
from tests.sweeps.random_programs import Model, Program, arguments, gradients, program_of

EVERYTHING = {"debug.codegen": "eager", "saved.min_numel": 0, "saved.group_size": 16, "linears": "off"}
# dB of eager in the dtype, below which a program is drawn again: there is no gradient to compare with.
CONDITION = {torch.float32: 40.0, torch.bfloat16: 25.0}
LEAST_DB = 12.0  # an error of a quarter


@dataclass(frozen=True)
class Judgement:
    """What was found; ``wrong`` says what is wrong, or is empty."""

    wrong: str
    encoded: int
    exact: int
    worst_db: float


def dtype_of(seed: int) -> torch.dtype:
    """Every fifth program is BF16."""
    return torch.bfloat16 if seed % 5 == 4 else torch.float32


def drawn(seed: int) -> Program:
    dtype = dtype_of(seed)
    return program_of(seed, dtype, CONDITION[dtype])


def judge(program: Program, checkpointed: bool = False) -> Judgement:
    """Run it both ways; ``checkpointed``: as one region."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        bound = outcome(Model(program, program.dtype, checkpointed), *arguments(program, program.dtype))
        found = gradients(program, _compiled(), program.dtype, checkpointed)
        reference = gradients(program, _compiled(preset="off") if program.draws else None, _reference_dtype(program))
    errors = {name: sqnr_db(reference[name], found[name]) for name in reference}
    worst = min(errors.values())
    simulated = min(bound.db)
    wrong = ""
    if not all(bool(g.isfinite().all()) for g in found.values()) or not bound.finite:
        wrong = f"not finite: {[n for n, g in found.items() if not bool(g.isfinite().all())]}"
    elif max(bound.excess) > 1:
        wrong = f"{max(bound.excess):.3g} times the propagated bound"
    elif program.dtype == torch.float32 and worst < allowed_db(simulated, CONDITION[torch.float32]):
        wrong = f"{worst:.1f} dB ({min(errors, key=lambda n: errors[n])}), where its codes make {simulated:.1f} dB"
    elif program.dtype == torch.float32 and min(bound.share_db) < LEAST_DB:
        wrong = f"{min(bound.share_db):.1f} dB under what its terms amount to"
    return Judgement(wrong, len(bound.encoded), len(bound.exact), worst)


def allowed_db(simulated: float, condition: float) -> float:
    """dB of twice the simulated error and the dtype's own together."""
    return -20 * math.log10(2 * 10 ** (-simulated / 20) + 2 * 10 ** (-condition / 20))


def _reference_dtype(program: Program) -> torch.dtype:
    """A program that draws random numbers is compared with itself, compiled without codes: eager draws others."""
    return program.dtype if program.draws else torch.float64


def _compiled(**options: Any) -> Callable[[nn.Module], Callable[..., Tensor]]:
    def compile_it(model: nn.Module) -> Callable[..., Tensor]:
        torch._dynamo.reset()
        return torch.compile(model, backend="fp8compile", options={**EVERYTHING, **options})  # type: ignore[return-value]

    return compile_it


def told(program: Program, found: Judgement) -> str:
    """The message of a failure: the program, to be run again from its seed."""
    return f"{found.wrong}\n\n{program.python}\nagain: drawn({program.seed})"
