"""Faults in what the backward computes again for a budget, and in what waits on the host."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_OFFLOAD = ("tests/passes/test_offload_codes.py", "tests/budget/test_link.py")
OF_BUDGET = ("tests/passes/test_recompute_for_budget.py", "tests/budget")

MEMORY = (
    Mutant(
        "budget: all copies where the first is",
        "fp8compile/budget/placing.py",
        "inserting_before(late[at])",
        "inserting_before(late[min(placed)])",
        OF_BUDGET,
    ),
    Mutant(
        "budget: random numbers are drawn again",
        "fp8compile/budget/repeatable.py",
        "draws_random_numbers(node) and",
        "False and",
        OF_BUDGET,
    ),
    Mutant(
        "budget: operators of any namespace are repeated",
        "fp8compile/budget/repeatable.py",
        'target.namespace not in ("aten", "prims")',
        'target.namespace == ""',
        OF_BUDGET,
    ),
    Mutant(
        "budget: gradients of parameters do not count",
        "fp8compile/analysis/liveness.py",
        "_in_backward(split, limits, with_gradients=True)",
        "_in_backward(split, limits, with_gradients=False)",
        OF_BUDGET,
    ),
    Mutant(
        "budget: what the caller has is given up",
        "passes/recompute_for_budget.py",
        '.startswith("output")',
        '.startswith("nothing")',
        OF_BUDGET,
    ),
    Mutant(
        "budget: policies are not followed",
        "passes/recompute_for_budget.py",
        "in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)",
        "in ()",
        OF_BUDGET,
    ),
    Mutant(
        "budget: the last state, not the first",
        "fp8compile/budget/frontier.py",
        "within = (state for state in states if",
        "within = (state for state in reversed(states) if",
        OF_BUDGET,
    ),
    Mutant(
        "budget: copies share the encoding of what they copy",
        "fp8compile/budget/placing.py",
        "dataclasses.replace(encoding)",
        "encoding",
        OF_BUDGET,
    ),
    Mutant(
        "budget: gradients are not held while the optimizer steps",
        "fp8compile/budget/fitting.py",
        "MOMENTS * gradients, 2 * gradients,",
        "MOMENTS * gradients, gradients,",
        ("tests/budget/test_fitting.py",),
    ),
    Mutant(
        "budget: frozen parameters have moments",
        "fp8compile/budget/fitting.py",
        'gradients = sum(nbytes(node.meta["val"]) for node in gradients_of_parameters(split))',
        "gradients = weights",
        ("tests/budget/test_fitting.py",),
    ),
    Mutant(
        "budget: kernels hold values from both sides of a matmul",
        "fp8compile/compiler/near_kernels.py",
        "max(places) - min(places) <= self.apart",
        "max(places) - min(places) <= self.apart + 1",
        ("tests/compiler/test_near_kernels.py",),
    ),
    Mutant(
        "budget: an operation of several stands where the first does",
        "fp8compile/compiler/near_kernels.py",
        "return (max(found),)",
        "return (min(found),)",
        ("tests/compiler/test_near_kernels.py",),
    ),
    Mutant(
        "fits: gradients of later graphs are forgotten",
        "fp8compile/reporting/running.py",
        "before + peaks.backward + made",
        "before + peaks.backward",
        ("tests/reporting/test_running.py",),
    ),
    Mutant(
        "fits: what is written over counts twice",
        "fp8compile/compiler/generated_memory.py",
        "alive[reused[1]] = alive.pop(reused[2])",
        "alive[reused[1]] = alive[reused[2]]",
        ("tests/compiler/test_generated_memory.py",),
    ),
    Mutant(
        "fits: saved values are not alive in the backward",
        "fp8compile/compiler/generated_memory.py",
        "given = _given(gm.graph) if is_backward else ()",
        "given = ()",
        ("tests/compiler/test_generated_memory.py",),
    ),
    Mutant(
        "offload: copies to the host do not wait for each other",
        "fp8compile/budget/link.py",
        "arrives = max(trip.made, free) + trip.us",
        "arrives = trip.made + trip.us",
        OF_OFFLOAD,
    ),
    Mutant(
        "offload: the device's memory is free while the copy runs",
        "fp8compile/budget/moving.py",
        "host, *private.until_waited_for(value))",
        "host)",
        OF_OFFLOAD,
    ),
    Mutant(
        "offload: a wait empties what a second backward reads",
        "fp8compile/_torch.py",
        '(None, kept) if "last_use_of_storage" in takes else (kept,)',
        "(kept,)",
        ("tests/test_canary_transfers.py",),
    ),
    Mutant(
        "offload: bytes on the host count as the device's",
        "fp8compile/fx/partition.py",
        " and not is_on_host(r)",
        "",
        OF_OFFLOAD,
    ),
    Mutant(
        "offload: copies begin where they are waited for",
        "fp8compile/budget/moving.py",
        "back = backward.last_until(times.back, read)",
        "back = read",
        OF_OFFLOAD,
    ),
    Mutant(
        "offload: what the backward makes again stands behind what reads it",
        "fp8compile/fx/order.py",
        "first = min(place[user]",
        "first = max(place[user]",
        ("tests/fx/test_order_of_backward.py",),
    ),
    Mutant(
        "order: codes of weights stay at the beginning",
        "fp8compile/fx/partition.py",
        "of_weights = sink_weights(self.fw.graph, self.static)",
        "of_weights = self.static",
        ("tests/fx/test_order.py",),
    ),
)
