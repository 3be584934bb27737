"""Faults in log-probabilities and entropies of logits that are computed in chunks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TESTS = ("tests/passes/test_chunk_logits_logprobs.py",)

LOGITS = (
    Mutant(
        "log-probabilities: each chunk has the targets of the first",
        "fp8compile/memory/chunked_one_hot.py",
        "at = torch.arange(columns.start, columns.stop, device=index.device)",
        "at = torch.arange(0, columns.stop - columns.start, device=index.device)",
        TESTS,
    ),
    Mutant(
        "log-probabilities: a sum over rows is one over columns",
        "fp8compile/memory/chunked_one_hot.py",
        'operand in found and over == [operand.meta["val"].dim() - 1]',
        "operand in found",
        (f"{TESTS[0]}::test_gradients_of_a_scale_and_of_a_bias",),
    ),
    Mutant(
        "log-probabilities: columns do not wait for the sums of rows",
        "fp8compile/memory/chunked_columns.py",
        "[self.ready, *first]",
        "[self.ready]",
        (f"{TESTS[0]}::test_a_chunk_is_computed_when_the_one_before_is_done",),
    ),
    Mutant(
        "log-probabilities: a sum of what may compare otherwise",
        "fp8compile/memory/chunked_sums.py",
        "if any(o in dependent and o.meta",
        "if False and any(o in dependent and o.meta",
        (f"{TESTS[0]}::test_what_is_declined_and_why",),
    ),
    Mutant(
        "log-probabilities: logits without a gradient are left",
        "fp8compile/analysis/logits.py",
        "if not self.results and len(forward) < len(self.axis):",
        "if not self.results:",
        (f"{TESTS[0]}::test_two_policies_in_one_graph",),
    ),
    Mutant(
        "log-probabilities: parts of logits are no softmax",
        "fp8compile/analysis/logits.py",
        " or _is_softmax(*_of_parts(self.parts))",
        "",
        (f"{TESTS[0]}::test_what_is_declined_and_why",),
    ),
)
