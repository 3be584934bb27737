"""Passes by name: each is switched off by TORCHINDUCTOR_DISABLED_PASSES, and timed by torch's compile_times()."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics, compile_times

import fp8compile
from fp8compile.compiler.hooks import REPORT
from tests.support.measure import compiled, gradients, kept_bytes, llama_case

ALL = "cut_for_bytes,save_sums,recompute_kept,save_normalised,encode_saved"


@pytest.mark.parametrize("disabled", ["", *ALL.split(",")])
def test_a_disabled_pass_does_nothing(disabled: str) -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    with torch._inductor.config.patch(disabled_passes=disabled):
        fn = compiled(layer, **{"saved.min_numel": 0})
        kept_bytes(layer, fn, args)
    report = fp8compile.report(fn)
    assert bool(report.saved) == (disabled != "encode_saved")
    assert [f"{n} is switched off" for n in disabled.split(",") if n] == [r.split(" by ")[0] for r in report.remarks]
    assert bool([r for r in report.recomputed if r.sources]) == (disabled == "cut_for_bytes"), (
        "upstream's own cut leaves much to recompute"
    )


def test_with_all_off_the_result_is_plain_inductors() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    with torch._inductor.config.patch(disabled_passes=ALL):
        fn = torch.compile(layer, backend="fp8compile")
        kept, got = kept_bytes(layer, fn, args), gradients(layer, fn, args)
    assert fp8compile.report(fn).saved_bytes == fp8compile.report(fn).saved_bytes_plain == kept
    torch._dynamo.reset()
    plain = torch.compile(layer, backend="inductor")
    assert kept_bytes(layer, plain, args) == kept
    expected = gradients(layer, plain, args)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_each_pass_that_ran_is_timed_and_so_is_the_report() -> None:
    layer, args = llama_case(seq=64, hidden=128, ffn=344)
    with torch._inductor.config.patch(force_disable_caches=True, disabled_passes="save_sums"):
        compilation_time_metrics.clear()
        kept_bytes(layer, compiled(layer, **{"saved.min_numel": 0}), args)
    names, seconds = compile_times("csv", aggregate=True)
    spent = {name: float(each) for name, each in zip(names, seconds, strict=True) if "fp8compile" in name}
    assert spent.keys() >= {REPORT, *(f"pass.fp8compile.{name}" for name in ALL.split(",") if name != "save_sums")}
    assert "pass.fp8compile.save_sums" not in spent
    assert spent["pass.fp8compile.encode_saved"] > 0 and 0 < spent[REPORT] < sum(spent.values())
