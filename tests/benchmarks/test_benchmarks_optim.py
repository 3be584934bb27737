"""The benchmarks of the optimizers: what they count and compare is what they say; they run, on a small scale."""

import json
import math

import pytest
import torch

from benchmarks.papers.small_model import SmallLM, byte_entropy
from benchmarks.papers.stability_runs import (
    EXPLODED,
    TO_ZERO,
    AblationAdamW,
    LinearToZero,
    TreeToZero,
    diverged,
    final_loss,
)
from benchmarks.papers.state_errors import EPS, Errors, Flushing, Moments, codecs, ranges, ratios
from benchmarks.studies import (
    bench_optimizer_states,
    bench_optimizer_training,
    bench_stability,
    bench_stochastic_rounding,
)
from benchmarks.studies.state_drift import Drift
from fp8compile.numerics.formats import INT8
from fp8compile.numerics.states.dynamic_tree import DynamicTree
from fp8compile.numerics.states.plain import LinearCodes

pytest.importorskip("transformers")
torch.set_num_threads(1)


def moments(rows: int = 32, columns: int = 256) -> Moments:
    """Drawn: v over 8 decades, beyond what E4M3 spans."""
    generator = torch.Generator().manual_seed(0)
    m = 1e-3 * torch.randn(rows, columns, generator=generator)
    v = 10.0 ** (-16 + 8 * torch.rand(rows, columns, generator=generator))
    return Moments("drawn", m, v)


def test_errors_are_those_of_the_definition() -> None:
    drawn, errors = moments(), Errors()
    errors.add(drawn)
    table = errors.table()
    assert table["fp32"]["fp32"] == 0
    m_hat, v_hat = (
        codec.decode(codec.encode(x), x.shape)
        for codec, x in ((codecs(True)["int8"], drawn.m), (codecs(False)["e4m3_expanded"], drawn.v))
    )
    exact = drawn.m.double() / (drawn.v.double().sqrt() + EPS)
    mse = (m_hat.double() / (v_hat.double().sqrt() + EPS) - exact).square().mean()
    assert table["int8"]["e4m3_expanded"] == pytest.approx(float(mse))
    assert ratios(table)["e4m3 / e4m3"] == 1


def test_only_the_flushing_variant_sends_v_to_zero() -> None:
    drawn = moments()
    for name, codec in codecs(signed=False).items():
        v_hat = codec.decode(codec.encode(drawn.v), drawn.v.shape)
        assert bool((v_hat > 0).all()) != isinstance(codec, Flushing), name


@pytest.mark.parametrize("state", ["m", "v"])
def test_ranges_after_expansion_stay_within_the_target(state: str) -> None:
    here = ranges([moments()])[state]
    for target, most in (("code", 448**2 / 2), ("paper", 448 * 512)):
        free = here[f"k {target}"] * 16 < 255  # k is not at its largest
        after = here[f"log10_range_after {target}"]
        # log10's rounding: a few ulp of a number around 5, 2**-21 each
        assert bool((after <= math.log10(most) + 8 * 2.0**-21).all())
        assert bool(free.any())


def test_drift_is_against_the_moments_that_torch_has() -> None:
    p = torch.nn.Parameter(torch.zeros(4, 128))
    optimizer = torch.optim.AdamW([p], betas=(0.9, 0.99))
    drift = Drift({"p": p}, (0.9, 0.99), (3,))
    drift.watch(optimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    # v: 3 steps of products and sums of what is never negative, 4 roundings each, in either order of operations
    twin, state = drift.twins["p"]["fp32"], optimizer.state[p]
    torch.testing.assert_close(twin.v, state["exp_avg_sq"], rtol=2 * 12 * 2.0**-24, atol=0)
    # m: the same count of roundings, none larger than half an ulp of the largest gradient, below 8
    torch.testing.assert_close(twin.m, state["exp_avg"], rtol=0, atol=2 * 12 * 8 * 2.0**-24)
    assert drift.rows.keys() == {"3"} and all(row["v"] > 0 for row in drift.rows["3"]["p"].values())


def test_bytes_count_whole_storages_once() -> None:
    x = torch.zeros(10)
    assert bench_optimizer_states.bytes_of([x, x[2:4], x.view(2, 5)]) == 40


def test_tensorwise_states_have_one_scale() -> None:
    model = SmallLM(stable=True)
    for tensorwise, states in ((True, "dynamic"), (False, "dynamic"), (True, f"linear{TO_ZERO}")):
        optimizer = AblationAdamW(model, states, tensorwise, lr=1e-3, compiled=False)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        state = optimizer.state[model.blocks[0].qkv.weight]
        scale = next(part for name, part in state.items() if name.startswith("exp_avg.") and "codes" not in name)
        assert scale.numel() == (1 if tensorwise else 3 * 128)
        assert set(optimizer.state[model.tokens.weight]) == {"step", "exp_avg.fp32.value", "exp_avg_sq.fp32.value"}


@pytest.mark.parametrize("kind", [LinearToZero, TreeToZero])
def test_to_zero_differs_below_the_smallest_code_only(kind: type[LinearToZero] | type[TreeToZero]) -> None:
    ours = {LinearToZero: LinearCodes(False, 128, INT8), TreeToZero: DynamicTree(False)}[kind]
    theirs = kind(False, 128, INT8) if kind is LinearToZero else kind(False)
    v = moments().v
    v_ours, v_theirs = (codec.decode(codec.encode(v), v.shape) for codec in (ours, theirs))
    assert bool((v_theirs == 0).any()) and bool((v_ours > 0).all())
    assert torch.equal(v_ours[v_theirs > 0], v_theirs[v_theirs > 0])


def test_divergence() -> None:
    assert byte_entropy(torch.tensor([7, 7, 9, 9])) == pytest.approx(math.log(2))
    assert not diverged([5.0] * 9 + [3.0], 3.0) and diverged([5.0] * 9 + [3.01], 3.0)
    assert diverged([1.0] * 20 + [math.nan], 3.0) and diverged([1.0] * 20 + [2 * EXPLODED], 3.0)
    assert final_loss([9.0] * 18 + [1.0, 3.0]) == 2.0


def test_gaps_are_to_the_same_seed() -> None:
    runs = {"torch": {"0": {"validation_loss": 2.0}}, "bf16": {s: {"validation_loss": 2.01} for s in ("0", "1")}}
    assert bench_optimizer_training.gaps(runs, "bf16") == pytest.approx([0.005])


@pytest.mark.parametrize("arms", ["torch,e4m3_expanded,bf16 split"])
def test_training_runs(arms: str, tmp_path) -> None:
    path = tmp_path / "training.json"
    found = bench_optimizer_training.main(["--quick", "--arms", arms, "--json", str(path)])
    assert json.loads(path.read_text())["runs"].keys() == set(arms.split(","))
    assert 0.8 < found["runs"]["e4m3_expanded"]["0"]["share_encoded"] < 1
    assert path.with_suffix(".png").stat().st_size > 0


def test_stability_runs(tmp_path) -> None:
    found = bench_stability.main(["--quick", "--json", str(tmp_path / "stability.json")])
    assert found["summary"]["fp32, plain embedding"]["median_gap"] in (0.0, None)
    assert (tmp_path / "stability.png").stat().st_size > 0


def test_stochastic_rounding_runs(tmp_path) -> None:
    pytest.importorskip("sklearn")
    found = bench_stochastic_rounding.main(["--quick", "--json", str(tmp_path / "rounding.json")])
    assert len(found["runs"]) == len(bench_stochastic_rounding.ARMS)
    assert all(math.isfinite(row["train_loss"]) for row in found["runs"])
