"""The study of set-ups: its figures are those of the models that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fp8compile
from benchmarks.harness import setups_section
from benchmarks.studies import bench_setup_training, residual_sizes
from benchmarks.studies.bench_setups import row
from benchmarks.studies.setups import OPAQUE, SETUPS, gradients, made
from fp8compile.extras.demo.model import SIZES
from tests.support.reference import sqnr_db


def test_another_librarys_kernel_has_the_gradients_of_attention() -> None:
    """Its backward is written by hand."""
    q, k, v = (torch.randn(2, 4, 16, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = torch.autograd.grad(torch.ops.fp8compile_setups.attention(q, k, v).square().sum(), (q, k, v))
    made_by = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = torch.autograd.grad(made_by.square().sum(), (q, k, v))
    assert all(sqnr_db(a, b) > 250 for a, b in zip(expected, found, strict=True))


def test_a_row_is_what_the_report_says() -> None:
    setup = SETUPS["LayerNorm blocks, checkpointed"]
    found = row(setup, with_peaks=False)
    # A block's input in a byte, two scales and two statistics a row of 256, over two bytes an element: 268 of 512.
    assert found["kept"] / found["plain"] == pytest.approx(268 / 512, rel=1e-3)
    assert sum(found["by"].values()) == found["kept"]
    assert found["ours_db"] > 30 and found["twin_db"] > 30, "BF16 itself has 35 where each operation rounds"
    assert found["fp8_db"] < found["ours_db"], "E4M3 and E5M2 round more than BF16"


def test_dropout_draws_the_same_numbers_in_every_arm() -> None:
    """Other masks would leave some 0 dB."""
    found = row(SETUPS["BERT, dropout, autocast"], with_peaks=False)
    assert found["twin_db"] > 25 and found["ours_db"] > 25


def test_a_model_has_the_same_weights_each_time() -> None:
    setup = SETUPS["LayerNorm blocks, checkpointed"]
    a, b = (gradients(setup, made(setup)) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_declared_kernel_keeps_codes() -> None:
    fp8compile.declare("fp8compile_setups::attention_backward", smooth=("q", "k", "v"))
    found = row(SETUPS[OPAQUE], with_peaks=False)
    assert found["kept"] <= found["goal"] * found["plain"]


def test_every_goal_that_is_missed_is_told_apart() -> None:
    rows = json.loads((setups_section.FOLDER / setups_section.NAME).read_text())["rows"]
    assert set(rows) == set(SETUPS)
    page = "\n".join(setups_section.setups(setups_section.FOLDER))
    for name, here in rows.items():
        assert (here["kept"] > (here["goal"] + 0.005) * here["plain"]) == (f"{name}: the logits" in page)


def test_arms_of_training_are_twins() -> None:
    assert len(bench_setup_training.ARMS) == 2 * len(bench_setup_training.SETUPS) + len(bench_setup_training.CONTROLS)
    runs = {
        "experts, plain": {"0": {"validation_loss": 2.0}, "1": {"validation_loss": 4.0}},
        "experts, ours": {"1": {"validation_loss": 4.1}},
        "experts, nudged": {"0": {"validation_loss": 1.9}},
    }
    found = bench_setup_training.summary(runs)
    assert found["experts"]["gap"] == pytest.approx(0.025)
    assert found["experts, nudged"]["gap"] == pytest.approx(-0.05)


def test_a_nudge_is_one_step_of_each_weight_and_of_no_other() -> None:
    makers = bench_setup_training.with_experts, bench_setup_training.nudged
    plain, nudged = (make(SIZES["tiny"], 0, torch.device("cpu")).state_dict() for make in makers)
    moved = {name for name in plain if not torch.equal(plain[name], nudged[name])}
    assert moved == {name for name in plain if "embed_tokens" in name}
    for name in moved:
        assert torch.equal(torch.nextafter(plain[name], torch.full_like(plain[name], torch.inf)), nudged[name])


def test_noise_is_of_its_size_in_every_gradient() -> None:
    makers = bench_setup_training.with_experts, bench_setup_training.with_noise
    found = []
    for make in makers:
        model = make(SIZES["tiny"], 0, torch.device("cpu"))
        tokens = torch.arange(64).view(2, 32)
        model(input_ids=tokens, labels=tokens).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    large = [name for name, exact in found[0].items() if exact.numel() > 1000]
    assert len(large) > 5
    for name in large:
        assert sqnr_db(found[0][name], found[1][name]) == pytest.approx(bench_setup_training.NOISE_DB, abs=1)


def test_ratios_are_read_from_a_model(tmp_path: Path) -> None:
    found = residual_sizes.main(["--tiny", "--steps", "2", "--seeds", "1", "--json", str(tmp_path / "sizes.json")])
    assert 0.5 < found["seeds"]["0"]["1"]["largest"] < 2
