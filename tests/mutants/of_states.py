"""Faults in optimizer states of few bits, in masters under a scale, and in gradients sent as codes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOGARITHMIC = ("tests/numerics/states/test_logarithmic.py",)
PLANES = ("tests/optim/test_planes.py",)
MASTERS = ("tests/numerics/states/test_scaled_weights.py", "tests/optim/test_scaled_masters.py")
EXCHANGE = ("tests/extras/links/test_ddp_gradients.py",)

STATES = (
    Mutant(
        "states: logarithmic codes keep the mean of v",
        "fp8compile/numerics/states/logarithmic.py",
        "POWER = 0.25",
        "POWER = 1.0",
        LOGARITHMIC,
    ),
    Mutant(
        "states: a level that is reached by a rounding more takes the next step",
        "fp8compile/numerics/states/logarithmic.py",
        "(16 - SLACK)",
        "(16 + SLACK)",
        LOGARITHMIC,
    ),
    Mutant(
        "states: an infinity below 0 is no amax",
        "fp8compile/numerics/states/logarithmic.py",
        "found = planes[0].abs()",
        "found = planes[0]",
        ("tests/numerics/states/test_properties.py",),
    ),
    Mutant(
        "states: bytes of a group hold pairs that lie side by side",
        "fp8compile/numerics/states/packing.py",
        "whole[p * several + i] << (bits * p)",
        "whole[i * per_byte + p] << (bits * p)",
        LOGARITHMIC,
    ),
    Mutant(
        "states: four bits of m round down",
        "fp8compile/numerics/states/companding.py",
        "codes = (14 - 14 / (1 + unit)).round()",
        "codes = (14 - 14 / (1 + unit)).floor()",
        LOGARITHMIC,
    ),
    Mutant(
        "optim: all planes draw the bits of the first",
        "fp8compile/optim/planes.py",
        "offset=plan.offset + k * p.shape[-1]",
        "offset=plan.offset",
        PLANES,
    ),
    Mutant(
        "optim: planes are as many as the widest format has",
        "fp8compile/optim/planes.py",
        "planes = max(8 // codec.bits",
        "planes = min(8 // codec.bits",
        PLANES,
    ),
    Mutant(
        "optim: a scaled master is rounded to nearest",
        "fp8compile/optim/plan.py",
        "master = scaled(p, inv_scale, bits)",
        "master = scaled(p, inv_scale)",
        MASTERS,
    ),
    Mutant(
        "optim: a scaled master saturates in silence",
        "fp8compile/numerics/states/scaled_weights.py",
        "torch.where(y.abs() > FP16_MAX, y.half(), ",
        "torch.where(y.abs() < 0, y.half(), ",
        MASTERS,
    ),
    Mutant(
        "optim: any scale of a master is loaded",
        "fp8compile/optim/low_bits.py",
        "if float(mantissa) != 0.5:",
        "if float(mantissa) == 0:",
        MASTERS,
    ),
    Mutant(
        "exchange: each rank has the scale of its own gradients",
        "fp8compile/extras/links/ddp.py",
        "        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)\n",
        "",
        EXCHANGE,
    ),
    Mutant(
        "exchange: a sum for a mean",
        "fp8compile/extras/links/ddp.py",
        "(summed / self._ranks)",
        "summed",
        EXCHANGE,
    ),
    Mutant(
        "exchange: mu looks at this rank's counts",
        "fp8compile/extras/links/ddp.py",
        "        dist.all_reduce(found, group=self.group)\n",
        "",
        EXCHANGE,
    ),
    Mutant(
        "exchange: mu doubles in a hundred steps",
        "fp8compile/numerics/gradient_scaling.py",
        "STEPS_TO_DOUBLE = 1000",
        "STEPS_TO_DOUBLE = 100",
        EXCHANGE,
    ),
)
