"""The reports of a model that Dynamo runs another one's code for: those of the latest that is alike."""

from __future__ import annotations

from unittest import mock

from torch import nn

from fp8compile.compiler import report_store
from fp8compile.compiler.runs import Runs
from fp8compile.recipe.recipe import Recipe
from fp8compile.reporting.compiled_graph import GraphReport


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


def test_the_latest_of_several_models_serves_another() -> None:
    first, latest, another = Net(), Net(), Net()
    kinds = frozenset({Net, nn.Linear})
    with mock.patch.object(report_store, "_compiled", []):
        for name, model in (("first", first), ("latest", latest), ("latest, again", latest)):
            paths, runs = [path for path, _ in model.named_parameters()], Runs(list(model.parameters()))
            report_store.remember((GraphReport(name),), Recipe(), paths, kinds, runs)
        own = [r.kind for c in report_store.compiled_for(first) for r in c.reports]
        served = [r.kind for c in report_store.compiled_for(another) for r in c.reports]
    assert own == ["first"] and served == ["latest", "latest, again"]
