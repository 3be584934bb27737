"""What each ablation computes, on numbers that can be checked by hand or by another way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.papers import coat, eight_bit, few_bit, jetfire, loss_scaling
from benchmarks.papers.eight_bit import BASE, EightBitRun
from benchmarks.papers.fp16_runs import Fp16Run
from benchmarks.papers.small_model import SmallLM, batches, fit, held_out_loss, loss_of, training_text
from fp8compile.extras.demo.arms import FP32, HISTOGRAM
from fp8compile.numerics.few_bit_backward import DERIVATIVES
from fp8compile.numerics.few_bit_tables import pieces_of
from fp8compile.numerics.metrics import sqnr

torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------- the small model


def test_the_same_seed_is_the_same_training() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = SmallLM(stable=True)
        runs.append((fit(model, 0, 3), held_out_loss(model, 128)))
    assert runs[0] == runs[1] and runs[0][0][0] > 4
    assert len(list(batches(training_text(), 0, 3))) == 3


def test_the_rate_warms_up_and_falls() -> None:
    p = nn.Parameter(torch.zeros(()))
    optimizer, seen = torch.optim.SGD([p], lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(optimizer.param_groups[0]["lr"]))
    torch.manual_seed(0)
    fit(SmallLM(stable=False), 0, 20, rate=1.0, optimizer=optimizer)
    assert seen == pytest.approx([0.5, *(1 - 0.9 * k / 20 for k in range(1, 20))])


# ------------------------------------------------------------------------------------------------------------ coat


def test_errors_are_multiples_of_expansions() -> None:
    table = coat.state_table({m: {v: 2.0 for v in coat.NAMES} for m in coat.NAMES})
    by_pair = {(row[0], row[1]): row[2:] for row in table.rows}
    assert len(table.rows) == 20
    assert by_pair["DE8 + Expand", "E4M3 + Expand"] == (2.0, 1.0, 7.47, pytest.approx(7.47 / 12.31))
    assert coat.best(table, 4) == "m in DE8 + Expand, v in E4M3 + Expand"
    itself = {m: {v: coat.PUBLISHED.get(m, {}).get(v, 1.0) for v in coat.NAMES} for m in coat.NAMES}
    assert coat.agreement(coat.state_table(itself)) == pytest.approx(1)


def test_k_within_the_published_span() -> None:
    found = coat.k_figures(torch.tensor([0.5, 1.0, 2.0, 3.0, 9.0]), (1, 3))
    assert found["median"] == 2 and found["share_in_published_span"] == pytest.approx(0.6)


def test_larger_groups_of_activations_have_larger_errors() -> None:
    torch.manual_seed(0)
    db = coat.activation_errors(SmallLM(stable=False))
    by_size = [db[f"int8 1x{size}"] for size in coat.GROUP_SIZES] + [db["int8 tensor"]]
    assert by_size == sorted(by_size, reverse=True) and db["int8 1x128"] > db["e4m3 1x128"]


# ------------------------------------------------------------------------------------------------------------ 8bit


def run(way: str, loss: float, stable: bool = False, **changes: float) -> EightBitRun:
    return EightBitRun(way, replace(BASE, stable=stable, **changes), loss, not math.isfinite(loss))  # type: ignore[arg-type]


def test_gaps_are_to_32_bits_with_the_same_setting() -> None:
    runs = [run(eight_bit.FP32, 2.0), run(eight_bit.FP32, math.nan, lr=0.03), run(eight_bit.FP32, 4.0, stable=True)]
    assert eight_bit.gap(run("8-bit linear", 2.2), runs) == pytest.approx(0.1)
    assert eight_bit.gap(run("8-bit linear", 5.0, stable=True), runs) == pytest.approx(0.25)
    assert eight_bit.gap(run("8-bit linear", 2.2, lr=0.03), runs) is None
    assert eight_bit.gap(run("8-bit linear", math.inf), runs) is None


def test_the_ablation_counts_what_diverged() -> None:
    runs = [run(eight_bit.FP32, 2.0), run(eight_bit.FP32, 2.0, lr=0.03)]
    runs += [run("8-bit linear", math.inf), run("8-bit linear", 2.1, lr=0.03)]
    rows = {(row[0], row[1]): row[2:] for row in eight_bit.ablation(runs).rows}
    assert rows["8-bit linear", "plain"] == ("1 of 2", None, "+5.00%", "+5.00%")
    assert rows[eight_bit.FP32, "plain"] == ("0 of 2", 2.0, "+0.00%", "+0.00%")
    assert rows["8-bit linear", "stable"] == ("0 of 0", None, None, None)


def test_settings_vary_one_hyperparameter_at_a_time() -> None:
    each = eight_bit.settings(2)
    assert len(each) == 2 * 2 * 9 and len(set(each)) == len(each)
    for setting in each:
        assert sum(getattr(setting, name) != getattr(BASE, name) for name, _ in eight_bit.AROUND) <= 1


# ---------------------------------------------------------------------------------------------------------- fewbit


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_gradient_is_dy_times_the_level_and_only_the_index_is_kept(bits: int) -> None:
    x = torch.randn(3, 50, requires_grad=True)
    dy, pieces, kept = torch.randn(3, 50), pieces_of("gelu", bits), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = few_bit.with_pieces(pieces)(x)
    assert torch.equal(y, F.gelu(x))
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, dy * pieces.at(pieces.index(x.detach())))
    (only,) = kept
    assert only.dtype == torch.uint8 and only.numel() == {1: 19, 2: 38, 3: 57, 4: 75}[bits]
    exact = dy * DERIVATIVES["gelu"](x.detach())
    assert sqnr(exact, dx) > 6 * bits


def test_the_exact_derivative_is_torchs() -> None:
    assert few_bit.with_pieces(None) is F.gelu
    assert list(few_bit.arms())[:2] == ["exact", "1 bit, normal"] and len(few_bit.arms()) == 9


def test_published_errors_are_those_that_the_numerics_are_held_against() -> None:
    for name, published in few_bit.PUBLISHED.items():
        ours = few_bit.errors_of(name)
        assert all(a <= b * 1.001 for a, b in zip(ours, published, strict=True)), name
        assert list(published) == sorted(published, reverse=True)


# --------------------------------------------------------------------------------------------------------- jetfire


@pytest.mark.parametrize("way", jetfire.WAYS)
def test_an_encoded_linear_has_three_products_of_encoded_operands(way: str) -> None:
    torch.manual_seed(0)
    codec = jetfire.WAYS[way]
    layer, x = jetfire.EncodedLinear(64, 96, codec), torch.randn(2, 16, 64, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)

    def coded(t: torch.Tensor) -> torch.Tensor:
        return jetfire.there_and_back(codec, t)

    rows, g, w = x.detach().flatten(0, 1), dy.flatten(0, 1), layer.weight.detach()
    assert torch.equal(y.flatten(0, 1), coded(rows) @ coded(w).T + layer.bias)
    assert torch.equal(dx.flatten(0, 1), coded(g) @ coded(w.T.contiguous()).T)
    assert torch.equal(dw, coded(g.T.contiguous()) @ coded(rows.T.contiguous()).T)
    assert torch.equal(db, g.sum(0)) or sqnr(g.sum(0), db) > 120
    for t in (rows, w, g):
        assert sqnr(t, coded(t)) > 25


def test_a_square_block_serves_both_orientations() -> None:
    x = torch.randn(96, 64)
    for way in ("INT8 32x32", "E4M3 32x32", "INT8 per tensor"):
        codec = jetfire.WAYS[way]
        assert torch.equal(jetfire.there_and_back(codec, x).T, jetfire.there_and_back(codec, x.T))
    codec = jetfire.WAYS["INT8 per row"]
    assert not torch.equal(jetfire.there_and_back(codec, x).T, jetfire.there_and_back(codec, x.T))


def test_operands_are_those_of_the_layers() -> None:
    torch.manual_seed(0)
    model = SmallLM(stable=False)
    found = jetfire.operands(model, 0)
    assert [tuple(w.shape) for _, w, _ in found] == [(384, 128), (128, 128), (512, 128), (128, 512)]
    loss_of(model, next(batches(coat.held_out_text(), 0, 1))).backward()
    for (x, w, g), layer in zip(found, (model.blocks[0].qkv, model.blocks[0].out), strict=False):
        dw = layer.weight.grad
        assert dw is not None and sqnr(dw, g.T @ x) > 100 and torch.equal(w, layer.weight)


def test_outliers_are_in_a_copy() -> None:
    torch.manual_seed(0)
    model = SmallLM(stable=False)
    changed = jetfire.with_outliers(model)
    assert model.norm.weight.max() == 1 and changed.norm.weight.max() == jetfire.FACTOR
    assert int((changed.norm.weight > 1).sum()) == 2  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------------------- als


def test_verdicts_are_the_demos() -> None:
    exact = Fp16Run(FP32, 0, start=5.0, end=3.0)
    rows = [exact, Fp16Run(HISTOGRAM, 0, start=5.0, end=3.1), Fp16Run("static 1", 0, start=5.0, end=4.9)]
    rows += [Fp16Run("static 2^7", 0, "diverged at step 3: ...", start=5.0)]
    assert [loss_scaling.verdict(row, rows) for row in rows] == [False, False, True, True]
    assert loss_scaling.scale_finding("x", rows) == "x: static 1, static 2^7 diverged; histogram did not."


def test_scales_are_those_after_the_warm_up() -> None:
    rising = [2.0**k for k in range(8)] + [64.0, 128.0, 64.0]
    rows = [Fp16Run(FP32, 0, start=5.0, end=3.0), Fp16Run(HISTOGRAM, 0, start=5.0, end=3.3, scales=rising)]
    table = loss_scaling.scale_table("x", rows, 10, {HISTOGRAM: "no seed diverges"})
    assert table.rows[0][0] == FP32 and table.rows[0][3:6] == (None, 0.0, None)
    assert table.rows[1][1:] == ("0 of 1", "3.3000", "+10.00%", 0.0, "2^6 to 2^7", "no seed diverges")


def test_findings_name_what_trains_and_what_rounding_costs() -> None:
    losses = {"FP32": 2.0, "FP16 nearest": 2.2, "FP16 stochastic": 2.01}
    rows = [{"update": u, "rate": rate, "train_loss": x} for u, x in losses.items() for rate in loss_scaling.RATES]
    assert loss_scaling.rounding_finding(rows).endswith("against FP32: FP16 nearest +10.0%, FP16 stochastic +0.5%.")
    arms = [("FP32", 5, 0), ("off", 0, 0), ("calibrated", 5, 2)]
    vit = [{"arm": arm, "steps_taken": taken, "nodes_widened": nodes} for arm, taken, nodes in arms]
    assert loss_scaling.island_finding(vit) == "The FP16 ViT trains with calibrated (2 nodes in FP32)."
    assert "none of them" in loss_scaling.island_finding(vit[:2])
