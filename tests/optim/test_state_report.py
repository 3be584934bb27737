"""What ``print(optimizer.report())`` says: before a step, totals, errors or why there are none, in 80 columns."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile import optim
from tests.support.optim_models import small_model


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_layer_with_quite_a_long_name = nn.Sequential(nn.Sequential(nn.Linear(64, 128)), nn.LayerNorm(128))
        self.embed = nn.Embedding(64, 64)


def stepped(optimizer: optim.EncodedOptimizer) -> optim.EncodedOptimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def words(text: str) -> str:
    return " ".join(text.split())


def test_before_the_first_step_it_says_so() -> None:
    report = optim.AdamW(small_model(), compiled=False).report()
    assert report.nbytes == 0 and not report.parameters
    assert words(str(report)).startswith("no step was taken yet") and "optimizer.step()" in str(report)


def test_a_total_in_bytes_is_counted_from_the_storages_format_by_format() -> None:
    optimizer = stepped(optim.AdamW(small_model().to(torch.bfloat16), master="split", compiled=False))
    report = optimizer.report()
    tensors = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    assert report.nbytes == sum(t.untyped_storage().nbytes() for t in tensors)
    assert report.bytes_by_format["int8"] == sum(p.numel() for p in optimizer.state)
    assert sum(report.bytes_by_format.values()) == report.nbytes
    assert re.match(
        r"[\d.]+ KiB of optimizer states on this device, [\d.]+ bits per parameter\n  e4m3_exp", str(report)
    )


def test_an_error_that_cannot_be_told_says_why_and_what_to_do() -> None:
    optimizer = stepped(optim.AdamW(small_model(), compiled=False))
    told = str(optimizer.report())
    assert re.search(r"\d dB$", told, re.M) and "exact" in told and "before optimizer.zero_grad()" not in told
    optimizer.zero_grad()
    without = words(str(optimizer.report()))
    assert not re.search(r"\d dB", without) and "Call report() after loss.backward() and before" in without
    assert "dB" not in str(stepped(optim.AdamW(small_model(), state_format="fp32", compiled=False)).report())


def test_k_is_explained_where_there_is_one() -> None:
    assert "k: a group of values is raised to the power k" in str(
        stepped(optim.AdamW(small_model(), compiled=False)).report()
    )
    plain = stepped(optim.AdamW(small_model(), state_format="int8", compiled=False)).report()
    assert "power k" not in str(plain)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_it_fits_80_columns_and_breaks_no_name(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    model = Deep()
    text = str(stepped(optim.AdamW(model, overrides={"*.1.bias": "bf16"}, compiled=False)).report())
    assert max(map(len, text.splitlines())) <= 80
    for name, p in model.named_parameters():
        assert re.search(rf"^{re.escape(name)}  {'x'.join(map(str, p.shape))}$", text, re.M), name
    assert "  because: an embedding\n" in text and "  because: named like *.1.bias\n" in text


def test_parameters_without_an_update_are_counted_and_states_that_are_none_said() -> None:
    model = small_model()
    optimizer = optim.AdamW(model, compiled=False)
    next(model.parameters()).grad = torch.randn_like(next(model.parameters()))
    optimizer.step()
    waiting = len(list(model.parameters())) - 1
    assert optimizer.report().waiting == waiting and f"{waiting} more parameters have not been updated" in str(
        optimizer.report()
    )
    plain = stepped(optim.SGD(small_model(), lr=0.1, compiled=False)).report()
    assert plain.nbytes == 0 and "this optimizer keeps no states" in str(plain)


def test_why_a_state_has_to_be_exact_is_told() -> None:
    p = nn.Parameter(torch.randn(64, 128))
    optimizer = fp8compile.optim.compress(torch.optim.Adagrad([p]), compiled=False)
    p.grad = torch.randn_like(p)
    optimizer.step()
    [parameter] = optimizer.report().parameters  # type: ignore[attr-defined]
    assert parameter.reason == "sum stays FP32: it keeps all that it was, so every rounding would stay in it"
    assert [state.format for state in parameter.states] == ["fp32"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_how_many_updates_are_small_is_counted_and_said_with_the_cure_where_it_is_most(dtype: torch.dtype) -> None:
    """At 1, 2 and -0.75 the halves of steps are eps / 2, eps and eps / 4; zeros have none; what stays does not count."""
    eps = torch.finfo(dtype).eps
    p = nn.Parameter(torch.tensor([[1.0, 1.0, 2.0, 2.0, -0.75, -0.75, 0.0, 1.0]], dtype=dtype))
    moves = torch.tensor([[0.49, 0.51, 0.99, 1.01, 0.24, -0.26, 1e-3, 0.0]], dtype=torch.float64) * eps
    optimizer = optim.SGD([p], lr=1.0, momentum=0.9, compiled=False)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    p.grad = torch.zeros_like(p)
    assert optimizer.report().small_updates == {}, "nothing moves"
    p.grad = moves.to(dtype)
    found = optimizer.report().small_updates
    assert found == {str(dtype).removeprefix("torch."): pytest.approx(3 / 7)}
    assert "half a step" not in str(optimizer.report())
    p.grad = (moves / 2).to(dtype)
    told = words(str(optimizer.report()))
    assert (
        "weights 86% would move by less than half a step of theirs" in told and 'master="split" keeps 8 more' in told
    )


def test_where_more_bits_are_kept_no_update_is_small() -> None:
    for dtype, master in ((torch.bfloat16, "split"), (torch.float32, "none")):
        optimizer = stepped(optim.AdamW(small_model().to(dtype), lr=1e-9, master=master, compiled=False))
        assert optimizer.report().small_updates == {} and "half a step" not in str(optimizer.report())
    report = stepped(optim.AdamW(small_model().bfloat16(), lr=1e-9, compiled=False)).report()
    assert report.small_updates["bfloat16"] > 0.9
