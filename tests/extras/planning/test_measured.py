"""The constants of the package against results files, captured layers and an optimizer's own states."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import fp8compile
from fp8compile.analysis import stored_values
from fp8compile.extras.planning.measured import LAYERS, OURS, PLAIN, SOURCE, STATE, STATE_FORMAT, Layer
from fp8compile.saved.stored import CENTRE_BYTES
from tests.support.measure import LlamaLayer
from tests.support.sources import ROOT

SCALARS = 128  # bytes: the generator's state and an FP32 scale for each operand of seven linears


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_constants_are_those_of_the_results(layer: Layer) -> None:
    found = json.loads((ROOT / SOURCE).read_text())["layers"][layer.name]
    assert (layer.plain, layer.ours) == (found["inductor"]["kept_bytes"], found["both"]["kept_bytes"])
    assert abs(found["storage_only"]["kept_bytes"] - layer.ours) < SCALARS, "FP8 linears save no more"


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_the_formula_is_what_was_counted(layer: Layer) -> None:
    """But for scalars, and the means of attention's result: one for each channel of a sequence."""
    centres = CENTRE_BYTES * layer.hidden * layer.sequences
    widths = (layer.hidden, layer.kv, layer.intermediate, layer.heads)
    assert 0 <= layer.plain - PLAIN.per_token(*widths) * layer.tokens < SCALARS
    assert 0 <= layer.ours - centres - OURS.per_token(*widths) * layer.tokens < SCALARS


class Stack(nn.Module):
    """Some Llama layers below each other."""

    def __init__(self, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(hidden, ffn, heads, kv_heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "kv_heads"),
    [
        (2, 256, 768, 4, 2),
        (1, 512, 1024, 8, 2),
        pytest.param(1, 256, 768, 4, 2, marks=pytest.mark.sweep),
        pytest.param(1, 256, 1024, 4, 4, marks=pytest.mark.sweep),
        pytest.param(3, 512, 1536, 8, 8, marks=pytest.mark.sweep),
    ],
)
def test_the_formula_is_what_captured_layers_save(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stored_values, "EXPONENTIALS", ()
    )  # a GPU computes SiLU again where it is read, a CPU does not
    model = Stack(layers, hidden, ffn, heads, kv_heads).bfloat16()
    x = torch.randn(4, 256, hidden, dtype=torch.bfloat16).requires_grad_()
    cos, sin = (torch.randn(256, hidden // heads, dtype=torch.bfloat16) for _ in range(2))
    report = fp8compile.explain(model, (x, cos, sin), recipe={"linears": "off"})
    tokens, widths = 4 * 256, (hidden, hidden // heads * kv_heads, ffn, heads)
    assert report.saved_bytes_plain == PLAIN.per_token(*widths) * tokens * layers
    centres = CENTRE_BYTES * hidden * 4  # of attention's result, a sequence each: left out of the formula
    assert report.saved_bytes == (OURS.per_token(*widths) * tokens + centres) * layers
    if layers == 1:
        fit = report.fits(80)
        for saved, estimated in ((PLAIN, fit.workspace_plain), (OURS, fit.workspace)):
            of_hidden, of_ffn = saved.workspace
            assert estimated == tokens * (of_hidden * hidden + of_ffn * ffn)


def test_states_are_as_large_as_the_optimizers() -> None:
    """``STATE`` for each moment of a matrix, one byte for ``master="split"``, FP32 for embeddings: see planning/bytes.py."""
    model = nn.Sequential(nn.Embedding(64, 256), nn.Linear(256, 512, bias=False)).bfloat16()
    optimizer = fp8compile.optim.AdamW(model, master="split", compiled=False)
    model(torch.arange(64)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["state_format"] == STATE_FORMAT
    held = [
        sum(t.nbytes for name, t in optimizer.state[p].items() if name != "step") / p.numel()
        for p in model.parameters()
    ]
    assert held == [1 + 2 * 4, 1 + 2 * STATE]
