"""Faults in a run of the first contact and in what README says of it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RUNS = ("tests/benchmarks/test_first_contact.py",)
READINGS = ("tests/benchmarks/test_first_readings.py",)
FIRST_CONTACT = (
    Mutant(
        "first contact: an arm that hangs is waited for",
        "benchmarks/first/runner.py",
        "if process.ran > self.limits.compiling:",
        "if process.ran > self.limits.seconds:",
        RUNS,
    ),
    Mutant(
        "first contact: a killed run begins anew",
        "benchmarks/first/runner.py",
        "if arm.name not in settled]",
        "if settled is not None]",
        RUNS,
    ),
    Mutant(
        "first contact: memory of the card is not counted",
        "benchmarks/first/runner.py",
        "if arm.kind.compiling_gib <= room or not taken]",
        "if room is not None]",
        RUNS,
    ),
    Mutant(
        "first contact: a stopped arm outlives its run",
        "benchmarks/first/speaking.py",
        "ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)",
        "pass",
        RUNS,
    ),
    Mutant(
        "first contact: what the end cuts off is settled",
        "benchmarks/first/runner.py",
        "if not process.done and self._left() > 0:",
        "if not process.done:",
        RUNS,
    ),
    Mutant(
        "readings: sides by the median",
        "benchmarks/first/comparisons.py",
        'float(self.fact["min_ms"])',
        'float(self.fact["ms"])',
        READINGS,
    ),
    Mutant(
        "readings: commits are mixed",
        "benchmarks/first/readings.py",
        '[fact for fact in found if fact["commit"] == commit]',
        "found",
        READINGS,
    ),
    Mutant(
        "readings: toy sizes count",
        "benchmarks/first/readings.py",
        'if not fact.get("tiny")]',
        "]",
        READINGS,
    ),
)
