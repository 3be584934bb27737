"""Faults in what ``fp8compile.extras.watching.watch`` writes down, and in the page that draws it."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

WATCHING = (
    Mutant(
        "watch: a scaler that was not given shifts the statistics by a step",
        "fp8compile/extras/watching/statistics.py",
        "found = observed.scaled and not self._scaled",
        "found = False",
        ("tests/extras/watching/test_statistics.py",),
    ),
    Mutant(
        "watch: of values that overflowed those that are looked at are counted",
        "fp8compile/extras/watching/statistics.py",
        "count += int(bad.sum())",
        "count = len(broken)",
        ("tests/extras/watching/test_statistics.py",),
    ),
    Mutant(
        "watch: hooked models without a scaler end no step",
        "fp8compile/observe/records.py",
        "if each.additions and not each.scaled]",
        "if isinstance(each, StatsSlot) and each.additions and not each.scaled]",
        ("tests/extras/watching/test_statistics.py",),
    ),
    Mutant(
        "watch: log called behind a step is about the next one",
        "fp8compile/extras/watching/watcher.py",
        "self._pending[-1].logged if self._logs_behind and self._pending else",
        "self._pending[-1].logged if not self._logs_behind and self._pending else",
        ("tests/extras/watching/test_watcher.py",),
    ),
    Mutant(
        "watch: a step that measures its FP8 scales has the headroom of the scales before",
        "fp8compile/extras/watching/operands.py",
        "if float(lowest) < least and not measured:",
        "if float(lowest) < least:",
        ("tests/extras/watching/test_numbers.py",),
    ),
    Mutant(
        "watch: the server answers to any name",
        "fp8compile/extras/watching/server.py",
        'self.headers.get("Host") not in self.server.hosts',
        'self.headers.get("Host") is None',
        ("tests/extras/watching/test_server.py",),
    ),
)
