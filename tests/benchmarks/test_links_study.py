"""The study of coded links: that a run learns, that changes are received better than direct codes, what its section says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness.links_section import NAME, links, rows
from benchmarks.harness.results import FOLDER
from benchmarks.studies.bench_links import EPOCHS, REGIMES, SEEDS
from benchmarks.studies.link_runs import Arm, Link, Pipeline, new_model, pretrained, run, samples, steps_of

torch.set_num_threads(1)


def test_a_run_sends_fewer_bits_and_receives_changes_better() -> None:
    weights = pretrained(0, 0)
    found = {
        name: run(arm, 0, weights, 16, 3, 1e-3, lambda text: None)
        for name, arm in {"plain": Arm(), "changes": Arm(3, 6, True), "direct": Arm(3, 6)}.items()
    }
    assert all(row["losses"][2] < row["losses"][0] for row in found.values())
    assert found["plain"]["bits_sent"] == 32 and found["plain"]["received_db"] == [None] * 3
    assert found["changes"]["bits_sent"] == found["direct"]["bits_sent"] == 3.25
    assert found["changes"]["received_db"][0] > 50, "a first visit in BF16"
    assert all(found["changes"]["received_db"][i] > found["direct"]["received_db"][i] + 3 for i in (1, 2))


def test_both_ends_agree_and_an_evaluation_is_exact() -> None:
    pipeline = Pipeline(new_model(0), Arm(2, 4, True))
    data = samples(0, 16)[:, :-1]
    for epoch in range(2):
        for ids in steps_of(0, epoch, 16):
            pipeline.ids = ids
            pipeline(data[ids])
    for link in pipeline.links:
        states = [end.kept.state_dict() for end in (link.sender, link.receiver)]
        assert torch.equal(states[0]["messages"], states[1]["messages"]) and len(states[0]["ids"]) == 16
    pipeline.ids = None
    assert torch.equal(pipeline(data), pipeline.model(data))


def test_gradients_pass_a_link_in_their_own_bits() -> None:
    x = torch.randn(4, 256, requires_grad=True)
    gradient = torch.randn(4, 256)
    link = Link(Arm(4, 4, True))
    link(x, [0, 1, 2, 3]).backward(gradient)  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(
        x.grad, link.gradients.decode(link.gradients.encode(gradient, None), x, None)
    )


def test_the_results_hold_what_the_page_claims() -> None:
    """Every arm has its seeds; at each bits and seed, changes end nearer to plain links than direct codes do."""
    found = json.loads((FOLDER / NAME).read_text())["regimes"]
    assert set(found) == set(REGIMES)
    for regime in found.values():
        arms = regime["arms"]
        assert all(
            len(seeds) >= SEEDS and len(row["losses"]) == EPOCHS for seeds in arms.values() for row in seeds.values()
        )
        for name in (each for each in arms if "changes" in each):
            for seed, row in arms[name].items():
                direct = arms[f"{name.split(',')[0]}, direct"][seed]
                assert row["fitted"] < direct["fitted"] and row["received_db"][-1] > direct["received_db"][-1]


def test_a_section_shows_gaps_to_plain_links_seed_by_seed(tmp_path: Path) -> None:
    row = {"fitted": 1.0, "held_out": 2.0, "received_db": [None, 10.0, 20.0], "bits_sent": 32.0}
    arms = {
        "plain": {"0": row, "1": {**row, "fitted": 2.0}},
        "4 bit, changes": {"0": {**row, "fitted": 1.1}, "1": {**row, "fitted": 2.2}},
    }
    plain, coded = rows(arms)
    assert plain == ("plain", "32.00", "1.5000", "2.0000", "", "")
    assert coded == ("4 bit, changes", "32.00", "+10.00% ± 0.00%", "+0.00% ± 0.00%", "10.0", "20.0")
    (tmp_path / NAME).write_text(
        json.dumps({"samples": 8, "epochs": 3, "regimes": {"new": {"steps_before": 0, "arms": arms}}})
    )
    assert "| 4 bit, changes | 32.00 | +10.00 % ± 0.00 % | +0.00 % ± 0.00 % | 10.0 | 20.0 |" in links(tmp_path)


def test_a_quick_study_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.studies import bench_links

    told: list[tuple[str, int]] = []
    row = {"losses": [], "fitted": 1.0}
    monkeypatch.setattr(bench_links, "pretrained", lambda seed, steps: {})
    monkeypatch.setattr(bench_links, "run", lambda arm, seed, *rest: told.append((str(arm), seed)) or row)
    path = tmp_path / "links.json"
    found = bench_links.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text())["regimes"] == found["regimes"] and len(told) == 10 + 3 + 5
    bench_links.main(["--quick", "--json", str(path)])
    assert len(told) == 18, "what the JSON has is not run again"
