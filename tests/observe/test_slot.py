"""Statistics come out of compiled graphs as the gradient of an extra input: exact, for whoever owns the parameters."""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8compile
from fp8compile.numerics.histogram import AMAX, INF, LARGE, NAN
from fp8compile.observe import records, slot
from fp8compile.recipe.context import StatsInputs
from tests.support.ranks import on_ranks
from tests.support.watched import EXACT, Broken, Net, batches, counted_on_ranks, counts_of, eager_counts, loss_of


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="fp8compile", options={**EXACT, **options})


@pytest.mark.parametrize("kind", [Net, Broken])
@pytest.mark.parametrize("scale", [2.0**-12, 2.0**4, 2.0**14])
def test_counts_equal_those_of_eager_hooks_exactly(kind: type[Net], scale: float) -> None:
    model = kind().half()
    eager = copy.deepcopy(model)
    run = compiled(model)
    for x in batches(32, 32, 48, 80):  # micro-batches of several sizes: recompiles, then dynamic shapes
        loss_of(run, x, scale).backward()
    expected = eager_counts(eager, batches(32, 32, 48, 80), scale)
    assert len(expected) == 2 + 1 + 4
    assert counts_of(model) == expected
    broken = sum(stats[INF] for stats in expected.values())
    assert broken > 0 if scale == 2.0**14 else broken == 0


def test_gradients_are_the_same_bits_with_and_without() -> None:
    model = Net().half()
    [x] = batches(32)
    gradients = []
    for observe in ("auto", False):
        torch._dynamo.reset()
        loss_of(compiled(model, **{"fp32.observe": observe}), x).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_generated_code_counts_what_it_stores() -> None:
    """Inductor computes in FP32 inside a kernel: counts are of the values as rounded to FP16."""
    model = Net().half()
    eager = copy.deepcopy(model)
    xs = batches(64)
    loss_of(compiled(model, **{"debug.codegen": "inductor"}), xs[0], 2.0**14).backward()
    ours, theirs = counts_of(model), eager_counts(eager, xs, 2.0**14)
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        if key[1] == "out":
            assert ours[key] == pytest.approx(expected, rel=2**-9)
            continue
        assert sum(ours[key][:4]) == sum(expected[:4])
        assert ours[key][INF] == pytest.approx(expected[INF], abs=2), "where an ulp of SiLU's derivative decides"
        assert ours[key][LARGE] == pytest.approx(expected[LARGE], abs=8)


def test_two_models_of_the_same_code_have_each_their_own() -> None:
    a, b = Net().half(), Net().half()
    xs = batches(32, 32)
    references = [eager_counts(copy.deepcopy(m), [x], 2.0**8) for m, x in ((a, xs[0]), (b, xs[1]))]
    runs = [compiled(a), compiled(b)]
    losses = [loss_of(run, x, 2.0**8) for run, x in zip(runs, xs, strict=True)]
    assert {o for loss in losses for o in records.of_loss(loss)} == {
        *records.of_model(a),
        *records.of_model(b),
    }
    assert not set(records.of_model(a)) & set(records.of_model(b))
    for loss in losses:
        loss.backward()
    assert [counts_of(a), counts_of(b)] == references


def test_a_loss_knows_the_graphs_it_will_run_backward_through() -> None:
    generator, critic = Broken().half(), Net().half()
    fake = compiled(generator)(*batches(32))
    both = compiled(critic)(fake).sum()
    assert len(records.of_loss(both)) == 3, "the graph break makes two"
    assert records.of_loss(torch.zeros((), requires_grad=True) * 2) == []
    assert records.of_loss(torch.zeros(())) == []


def test_only_backward_adds_to_it() -> None:
    model = Net().half()
    run, [x] = compiled(model), batches(32)
    torch.autograd.grad(loss_of(run, x), list(model.parameters()))
    with torch.no_grad():
        run(x)
    assert all(o.additions == 0 and not o.current.any() for o in records.of_model(model))
    loss_of(run, x).backward()
    [seen] = records.of_model(model)
    assert seen.additions == 1 and seen.values.grad is None


def test_a_step_is_closed_and_the_first_overflow_stays() -> None:
    model = Net().half()
    run, [x] = compiled(model), batches(32)
    for scale in (2.0, 2.0**20, 2.0):
        loss_of(run, x, 1.0).backward() if scale == 2.0 else loss_of(run, x * 0 + 60000, 8.0).backward()
        for each in records.of_model(model):
            each.close()
    [seen] = records.of_model(model)
    assert [step for step, _ in seen.history] == [1, 2, 3] and seen.step == 3
    first = {row.op: int(step) for row, step in zip(seen.rows, seen.first, strict=True) if row.direction == "forward"}
    assert first["addmm.default"] == 2 and first["input"] == -1


class Steep(Net):
    """The gradient of ``up``'s result is 8 times that of ``down``'s input, so that it alone can overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * 8)


def steep() -> tuple[Steep, Tensor]:
    """The model and an input so small that only the gradient between the two linears leaves FP16's range."""
    model = Steep().half()
    with torch.no_grad():
        model.down.weight.fill_(1.0)
    return model, batches(32)[0] * 2**-14


def test_a_compiled_optimizer_closes_steps_and_does_not_trace_how() -> None:
    """Its hook reads weak references, which Dynamo makes anew as what they point to: a step raised TypeError."""
    model, other = Net().half(), Net().half()
    [x] = batches(32)
    loss_of(compiled(other), x).backward()  # observed as well, and of another optimizer
    run, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.0)
    step = torch.compile(optimizer.step, backend="eager")
    for closed in (1, 2, 3):
        loss_of(run, x).backward()
        step()
        assert [each.step for each in records.of_model(model)] == [closed]
    assert [(each.step, each.additions) for each in records.of_model(other)] == [(0, 1)]


def test_gradients_are_clipped_once_a_scaler_asks() -> None:
    model, x = steep()
    run, largest = compiled(model), []
    for on in (False, True, False):
        model.zero_grad()
        loss = loss_of(run, x, 2.0**9)  # 64 ones * 2**9 = 2**15 reach down's input; times 8 is 2**18
        [seen] = records.of_loss(loss)
        seen.saturate(on)
        loss.backward()
        largest.append(float(model.up.weight.grad.abs().max()))
        gradient = [
            s for r, s in zip(seen.rows, seen.current, strict=True) if r.op == "mul.Tensor" and "back" in r.direction
        ]
        assert gradient[0][INF] == gradient[0][:4].sum() == 32 * 128, "what is clipped counts as inf"
        seen.close()
    assert largest[1] < 1000 and not any(value < torch.inf for value in (largest[0], largest[2]))


def test_it_may_be_asked_for_between_forward_and_backward() -> None:
    model, x = steep()
    loss = loss_of(compiled(model), x, 2.0**9)
    [seen] = records.of_loss(loss)
    seen.saturate(True)
    loss.backward()
    assert model.up.weight.grad.isfinite().all()


def test_nan_is_not_clipped() -> None:
    model = Net().half()
    run, [x] = compiled(model), batches(32)
    x[3, 5] = torch.nan
    loss = loss_of(run, x)
    [seen] = records.of_loss(loss)
    seen.saturate(True)
    loss.backward()
    assert model.up.weight.grad.isnan().any()
    data = [stats for row, stats in zip(seen.rows, seen.current, strict=True) if row.kind == "data"]
    assert data[0][NAN] == 1 and data[0][AMAX] < 10


def test_nothing_is_kept_alive() -> None:
    model = Net().half()
    run, [x] = compiled(model), batches(32)
    loss_of(run, x).backward()
    assert records.of_model(model)
    before = len(records.alive())
    del run
    torch._dynamo.reset()
    gc.collect()
    assert len(records.alive()) == before - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_fp16_nothing_is_added(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    x = batches(32)[0].to(dtype)
    compiled(model, **{"fp32.observe": "auto"})(x).sum().backward()
    assert records.of_model(model) == []
    assert fp8compile.explain(model, (x,)).observed == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_observed_on_request(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    compiled(model, **{"fp32.observe": True})(batches(32)[0].to(dtype)).sum().backward()
    [seen] = records.of_model(model)
    named = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    assert {row.dtype for row in seen.rows if row.module in ("up", "down", "up.weight")} == {named}


def test_integers_and_autocast() -> None:
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64))
    run = compiled(model, **{"fp32.observe": "auto"})
    with torch.autocast("cpu", torch.float16):
        loss = run(torch.arange(16)).float().sum()
    loss.backward()
    [seen] = records.of_model(model)
    assert {row.module for row in seen.rows if row.kind == "weight"} == {"1.weight", "1.bias"}
    assert all(row.dtype == "f16" for row in seen.rows)


def test_a_part_of_the_model_can_be_left_out() -> None:
    model = Net().half()
    loss_of(compiled(model, modules={"up": {"fp32.observe": False}}), *batches(32)).backward()
    [seen] = records.of_model(model)
    assert {row.module for row in seen.rows} >= {"down", "down.weight"}
    assert not [row for row in seen.rows if row.module.startswith("up")]


def test_parameters_shared_with_frozen_ones() -> None:
    model = Net().half()
    model.up.requires_grad_(False)
    loss_of(compiled(model), *batches(32)).backward()
    [seen] = records.of_model(model)
    assert {row.module for row in seen.rows if row.kind == "weight"} == {"down.weight", "down.bias"}


PROCESS = """
import json, torch
from torch._dynamo.utils import counters
from fp8compile.observe import records, slot
from fp8compile.recipe.context import StatsInputs
from tests.support.watched import Net, batches, loss_of
torch.manual_seed(0)
model = Net().half()
loss_of(torch.compile(model, backend="fp8compile"), *batches(32)).backward()
[seen] = records.of_model(model)
print(json.dumps({
    "rows": [str(row) for row in seen.rows], "counts": seen.current.tolist(),
    "hits": counters["aot_autograd"]["autograd_cache_hit"], "misses": counters["aot_autograd"]["autograd_cache_miss"],
}))
"""


def test_a_warm_cache_gives_the_same_rows_and_counts(tmp_path: Path) -> None:
    def process() -> dict[str, Any]:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-c", PROCESS], capture_output=True, text=True, env=env, cwd=root, check=False
        )
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    cold, warm = process(), process()
    assert (cold["hits"], cold["misses"], warm["hits"], warm["misses"]) == (0, 1, 1, 0)
    assert cold["rows"] == warm["rows"] and cold["counts"] == warm["counts"] and cold["rows"]


def test_gradient_checkpointing_and_accumulation_into_one_step() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Checkpointed().half()
    run = compiled(model)
    for x in batches(32, 32):
        loss_of(run, x).backward()
    assert {o.additions for o in records.of_model(model)} == {2}


def test_counts_are_exact_on_two_ranks_with_uneven_data() -> None:
    results = on_ranks(2, counted_on_ranks)
    assert all(ours == theirs for ours, theirs in results)
    assert results[0] != results[1]


def test_the_extra_inputs_lie_where_the_gradients_are() -> None:
    """An input on the CPU would keep the graph of a GPU out of CUDA graphs."""
    ids, p = torch.zeros(3, dtype=torch.int64), nn.Parameter(torch.empty(3, device="meta"))
    fed = slot.WithStatsInputs(lambda *args: None, StatsInputs(2, 4, ((1, "p"),)), {}, [ids, p], list)
    made = fed.slots.of([ids, p])
    assert {t.device.type for t in (made.values, made.limit, made.indices, made.current)} == {"meta"}
