"""The backend as torch.compile sees it (after PyTorch's own test/dynamo/test_backends.py), its errors and its neighbours."""

from __future__ import annotations

import logging
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.custom_graph_pass import CustomGraphPass

import fp8compile
from fp8compile.compiler import report_store
from fp8compile.compiler.named_passes import InTurn
from fp8compile.recipe.context import Context
from fp8compile.reporting.entries import LINEAR
from tests.support.measure import compiled


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})


def test_it_is_listed_without_importing_the_package() -> None:
    listed = run(
        "import torch._dynamo as d, sys; print('fp8compile' in d.list_backends(), 'fp8compile' in sys.modules)"
    )
    assert listed.stdout.split() == ["True", "False"], listed.stderr


def test_it_gives_the_same_result_as_eager() -> None:
    model, x = mlp(), torch.randn(10, 64)
    assert torch.allclose(torch.compile(model, backend="fp8compile")(x), model(x), atol=1e-5)


def test_it_can_be_passed_as_a_function_and_compiles_in_place() -> None:
    from fp8compile.compiler.backend import fp8compile as backend

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model, x = Own(), torch.randn(128, 64)
    model.compile(backend=backend, options={"debug.codegen": "eager"})
    model(x).sum().backward()
    assert fp8compile.report(model).saved


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"saved_fromat": "int8"}}, "Did you mean 'saved.format'?"),
        ({"options": {"preset": "defualt"}}, "Did you mean 'default'?"),
        ({"mode": "max-autotun"}, "Did you mean 'max-autotune'?"),
        ({"options": {"debug.inductor": {"max_autotun": True}}}, "Did you mean 'max_autotune'?"),
    ],
)
def test_a_wrong_option_is_refused_in_one_line_that_torch_does_not_wrap(
    arguments: dict[str, object], message: str
) -> None:
    run = torch.compile(mlp(), backend="fp8compile", **arguments)  # type: ignore[call-overload]
    for _ in range(2):  # it is no reason to go on uncompiled
        with pytest.raises(ValueError) as caught:
            run(torch.randn(2, 64))
        assert message in str(caught.value).splitlines()[0]


def test_modes_mean_what_they_mean_for_inductor() -> None:
    from torch._inductor import list_mode_options

    from fp8compile.compiler.inductor_options import mode_options

    for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "default"):
        assert mode_options(mode) == list_mode_options().get(mode, {})
    seen = {}

    def look(graph: torch.fx.Graph) -> None:
        seen["autotune"] = torch._inductor.config.max_autotune

    with torch._inductor.config.patch(joint_custom_post_pass=look):
        torch.compile(mlp(), backend="fp8compile", mode="max-autotune")(torch.randn(2, 64))
    assert seen == {"autotune": True}
    assert not torch._inductor.config.max_autotune, "patches are local to the call"


def test_the_users_own_inductor_pass_keeps_running() -> None:
    ran: list[str] = []
    with torch._inductor.config.patch(joint_custom_post_pass=lambda graph: ran.append("theirs")):
        fn = compiled(mlp())
        fn(torch.randn(128, 64)).sum().backward()
    assert ran == ["theirs"] and fp8compile.report(fn).saved


class Named(CustomGraphPass):
    """A pass of the user's that says who it is."""

    def __init__(self, ran: list[str]) -> None:
        self.ran = ran

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.ran.append("named")

    def uuid(self) -> str:
        return "named"


def test_several_passes_of_the_users_run_in_turn_before_ours() -> None:
    ran: list[str] = []
    with torch._inductor.config.patch(joint_custom_post_pass=[Named(ran), lambda graph: ran.append("nameless")]):
        fn = compiled(mlp())
        fn(torch.randn(128, 64)).sum().backward()
    assert ran == ["named", "nameless"] and fp8compile.report(fn).saved


def test_passes_in_turn_have_a_name_for_the_cache_if_each_has_one() -> None:
    assert InTurn(Named([]), Named([])).uuid() == ("named", "named")
    assert InTurn(Named([]), print).uuid() is None  # Inductor then compiles without its cache


def test_inductors_own_activation_quantisation_is_not_stacked_on(caplog: pytest.LogCaptureFixture) -> None:
    report_store._warned.clear()
    options = {"activation_quantization_aten_pass": {}}
    with (
        torch._inductor.config.patch(post_grad_fusion_options=options),
        caplog.at_level(logging.WARNING, "fp8compile"),
    ):
        fn = compiled(mlp())
        fn(torch.randn(128, 64)).sum().backward()
    assert [r.message for r in caplog.records if "does not stack" in r.message], "one warning"
    report = fp8compile.report(fn)
    assert not report.saved and any("does not stack" in r for r in report.remarks)


def test_another_partitioner_is_refused() -> None:
    from fp8compile.compiler.hooks import Partitioner

    with (
        torch._inductor.config.patch(custom_partitioner_fn=Partitioner(Context(fp8compile.Recipe()), "theirs")),
        pytest.raises(BackendCompilerFailed, match="cannot be cut by two"),
    ):
        compiled(mlp())(torch.randn(2, 64))


def test_fp8_linears_asked_for_in_vain_are_reported() -> None:
    fn = compiled(mlp(), linears="tensorwise", saved="off")
    fn(torch.randn(128, 64)).sum().backward()
    assert {x.reason.split(" that")[0] for x in fp8compile.report(fn).notes.skipped(LINEAR)} == {
        "cpu has no FP8 matrix units"
    }


def test_a_report_of_a_model_never_compiled_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="run one step first"):
        fp8compile.report(nn.Sequential(nn.Linear(3, 5)))


def test_reports_belong_to_their_own_model() -> None:
    first, second = mlp(), mlp()
    for model in (first, second):
        compiled(model)(torch.randn(128, 64)).sum().backward()
    reports = [fp8compile.report(model) for model in (first, second)]
    assert [len(r.graphs) for r in reports] == [1, 1]
    assert report_store.compiled_for(first) == report_store.compiled_for(second), "Dynamo compiled once, for both"
    assert [(r.graphs[0].runs, r.remarks) for r in reports] == [(0, ()), (1, ())], "in the last step the second ran"
    never_ran = fp8compile.report(compiled(mlp()))
    assert report_store.COMPILED_FOR_ANOTHER_INSTANCE in never_ran.remarks


def test_torch_outside_the_supported_range_is_refused_at_import() -> None:
    from fp8compile._version import check_torch

    for version in ("2.10.1", "2.16.0", "3.0", "1.13.1+cu117"):
        with pytest.raises(ImportError, match=r"pip install 'torch>=2\.11,!=2\.14\.\*,<2\.16'"):
            check_torch(version)
    with pytest.raises(
        ImportError, match=r"this is torch 2\.14\.1: the assembler of its triton 3\.8 corrupts an FP8 value"
    ):
        check_torch("2.14.1")
    for version in ("2.11.0", "2.13.0+cpu", "2.12.1a0+git1234", "2.15.0"):
        check_torch(version)


def test_a_compilation_that_failed_leaves_nothing_in_the_next_ones_report() -> None:
    model, x = mlp(), torch.randn(128, 64, requires_grad=True)
    fn = compiled(model, **{"saved.min_numel": 0})
    with (
        mock.patch("fp8compile.compiler.inductor.run_the_graph", side_effect=ValueError("no room")),
        pytest.raises(BackendCompilerFailed, match="no room"),
    ):
        fn(x)
    torch._dynamo.reset()
    fn(x)
    assert len(fp8compile.report(fn).graphs) == 1
