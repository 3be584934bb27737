"""What is said of a model that was to be compiled and was not: when, once, and where nothing may be said."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp8compile
from fp8compile import _torch as private
from fp8compile.compiler import nothing_compiled, report_store
from tests.support.measure import compiled

X = torch.ones(2, 4)


def container() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Never(Own):
    """One that Dynamo may not trace, on any torch."""

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="fp8compile", options={"debug.codegen": "eager"})
    return model


compiles_no_container = pytest.mark.skipif(
    private.COMPILES_CONTAINERS, reason="from torch 2.15 on Dynamo compiles a container in place"
)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings so far, in a process that has asked for the backend and compiled nothing yet."""
    torch.compile(container(), backend="fp8compile")  # the real one is watched from here on at the latest
    monkeypatch.setattr(report_store, "_compiled", [])
    monkeypatch.setattr(report_store, "_warned", set())
    monkeypatch.setattr(report_store, "_arrived", False)
    before = dict(hooks)
    hooks.clear()
    monkeypatch.setattr(nothing_compiled, "_watch", nothing_compiled._CompilationWatch())
    caplog.set_level(logging.WARNING, "fp8compile")
    yield lambda: [record.getMessage() for record in caplog.records if record.name == "fp8compile"]
    hooks.clear()
    hooks.update(before)


def steps(*models: nn.Module, times: int = 1, calls: bool = True) -> None:
    """Optimizer steps of all these models together."""
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for _ in range(times):
        for model in models if calls else ():
            model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_hook_of_the_user_s_survives_the_first_step(said: Callable[[], list[str]]) -> None:
    """torch goes through its hooks while they run: none of ours may remove itself."""
    seen = list[object]()
    handle = register_optimizer_step_post_hook(lambda *told: seen.append(told))
    steps(in_place(Own()), times=2)
    handle.remove()
    assert len(seen) == 2


@compiles_no_container
def test_a_container_compiled_in_place_is_told_of_once_with_the_fix(said: Callable[[], list[str]]) -> None:
    model = in_place(container())
    steps(model)
    (told,) = said()
    assert "Sequential.compile(backend='fp8compile') has compiled no graph" in told and "torch.nn defines" in told
    assert "model = torch.compile(model, backend='fp8compile')" in told
    steps(model, times=3)
    nothing_compiled.say_at_exit()
    assert said() == [told]


@pytest.mark.skipif(not private.COMPILES_CONTAINERS, reason="before torch 2.15 Dynamo skips a container in place")
def test_a_container_compiled_in_place_is_compiled(said: Callable[[], list[str]]) -> None:
    model = in_place(container())
    steps(model)
    assert fp8compile.report(model).graphs and not said()


def test_the_fix_is_one(said: Callable[[], list[str]]) -> None:
    model = compiled(container())
    steps(model)  # type: ignore[arg-type]
    assert fp8compile.report(model).graphs and not said()  # type: ignore[arg-type]


def test_a_forward_that_dynamo_may_not_trace_has_another_cause(said: Callable[[], list[str]]) -> None:
    steps(in_place(Never()))
    (told,) = said()
    assert "Never.compile" in told and "TORCH_LOGS=graph_breaks" in told and "torch.nn" not in told


def test_a_model_of_several_of_which_one_is_compiled_in_vain(said: Callable[[], list[str]]) -> None:
    never = Never()
    never.linear = nn.Linear(4, 6)  # of Own's shapes, its graph might be the model's
    steps(in_place(Own()), in_place(never))
    (told,) = said()
    assert "Never" in told


@pytest.mark.parametrize(
    "model",
    [
        lambda: in_place(Own()),
        lambda: nn.Sequential(in_place(Own()), nn.Linear(4, 4)),
        lambda: compiled(nn.Sequential(in_place(container()), Own())),
    ],
    ids=["in place", "a block in place", "a container in what is compiled as a whole"],
)
def test_what_is_compiled_is_not_told_of(model: Callable[[], nn.Module], said: Callable[[], list[str]]) -> None:
    steps(model(), times=2)
    assert not said()


def test_what_was_not_called_is_not_told_of_until_it_is(said: Callable[[], list[str]]) -> None:
    model, other = in_place(Never()), Own()
    steps(model, calls=False)
    steps(other, times=2)
    assert not said()
    steps(model)
    assert len(said()) == 1


class Routed(nn.Module):
    """Experts in a loop that breaks the graph: Dynamo gives the whole frame up."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=bool(i)) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in self.experts:
            rows = (x[:, 0] > 0).nonzero().squeeze(1)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]))
        return y


def test_a_wrapped_model_is_told_of_at_its_first_step_whatever_else_was_compiled(
    said: Callable[[], list[str]],
) -> None:
    steps(compiled(nn.Linear(4, 7)))  # type: ignore[arg-type]
    assert not said()
    model: nn.Module = compiled(Routed())  # type: ignore[assignment]
    steps(model)
    (told,) = said()
    assert "torch.compile(Routed, backend='fp8compile') has compiled no graph" in told and "graph_breaks" in told
    steps(model, times=2)
    assert said() == [told]


def test_another_backend_and_dynamo_switched_off_are_not_told_of(said: Callable[[], list[str]]) -> None:
    model = container()
    model.compile(backend="eager")
    steps(model)
    with torch._dynamo.config.patch(disable=True):
        steps(in_place(container()))
    torch._dynamo.reset()
    with torch.compiler.set_stance("force_eager"):
        steps(in_place(container()))
    assert not said()


def test_the_hook_adds_no_graph_to_a_step_that_is_compiled(said: Callable[[], list[str]]) -> None:
    counts = []
    for watched in (True, False):
        torch._dynamo.reset()
        if not watched:
            hooks.clear()
        model, graphs = Own(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        step = torch.compile(optimizer.step, backend=lambda gm, inputs, graphs=graphs: graphs.append(gm) or gm)
        for _ in range(3):
            model(X).sum().backward()
            step()
        assert bool(hooks) == watched and graphs
        counts.append(len(graphs))
    assert counts[0] == counts[1] and not said()


# ------------------------------------------------------------------------------------------------ at the end of a program

ASK = "import torch; from torch import nn; m = nn.Sequential(nn.Linear(4, 4)); m.compile(backend='fp8compile')\n"
CALL = "m(torch.ones(1, 4))\n"
AT_EXIT = {
    "called": (ASK + CALL, not private.COMPILES_CONTAINERS),
    "called, and an error ends the program": (ASK + CALL + "raise ValueError('unrelated')", False),
    "never called, another backend compiled": (
        ASK + "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
        False,
    ),
    "called as plain eager on purpose": (ASK + "torch.compiler.set_stance('force_eager')\n" + CALL, False),
    "a graph that could not be compiled": (
        ASK + "try: torch.compile(lambda x: x + 1, backend='fp8compile', options={'no': 1})(torch.ones(2))\n"
        "except Exception: pass\n" + CALL,
        False,
    ),
}


@pytest.mark.parametrize("case", AT_EXIT)
def test_at_the_end_of_a_program(case: str) -> None:
    code, told = AT_EXIT[case]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stderr.count("compiled no graph") == told, ran.stderr
