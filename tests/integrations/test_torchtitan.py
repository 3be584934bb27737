"""torchtitan: its check for FlexAttention, its overrides, its optimizer container, and graph_trainer as a host."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import fp8compile
from fp8compile import Recipe

pytest.importorskip("torchtitan")

import torchtitan.trainer  # noqa: F401  the whole of it first, as its own programs do
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import _get_default_save_ops
from torchtitan.distributed.compile import apply_compile
from torchtitan.experiments.graph_trainer import passes as titan_passes
from torchtitan.experiments.graph_trainer.common_utils import annotate_module_fqns
from torchtitan.experiments.graph_trainer.llama3.config_registry import graph_trainer_llama3_debugmodel
from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy
from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY
from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass
from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from examples import torchtitan_llama as example
from fp8compile.fx.ops import is_attention
from fp8compile.integrations import torchtitan as ours
from fp8compile.integrations.graph_trainer import Fp8Passes, register_pipeline
from tests.integrations.one_graph import decibels
from tests.integrations.parity import assert_parity
from tests.integrations.twins import beside_its_twin

NAME = "fp8compile.integrations.torchtitan"
SINGLE = mock.Mock(tp_enabled=False)
CONFIG = CompileConfig(enable=True, backend="fp8compile")
EXACT = Recipe(linears={"emulate": True}, debug={"codegen": "eager"}, saved="off")
KEPT = _get_default_save_ops() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}
POLICIES = {
    "default": lambda node: CheckpointPolicy.MUST_SAVE if node.target in KEPT else CheckpointPolicy.PREFER_RECOMPUTE,
    "full": lambda node: CheckpointPolicy.MUST_SAVE if is_attention(node) else CheckpointPolicy.MUST_RECOMPUTE,
}
TOKENS = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(0))
PLACES = torch.arange(128).expand(2, -1)


@pytest.fixture(autouse=True, scope="module")
def dynamo_s_settings_are_taken_back() -> Iterator[None]:
    """``apply_compile`` makes them, for the whole process."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        yield


def llama(layers: int) -> Any:
    """torchtitan's "debugmodel" with SDPA: FlexAttention has no backward on a CPU. The same parameters at each call."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_weights(buffer_device=None)
    return model


def test_its_check_for_flex_attention_and_the_override_that_it_lets_through() -> None:
    config = llama3_configs["debugmodel"]("flex")
    with pytest.raises(ValueError, match="compile backend 'fp8compile' is neither 'inductor' nor 'aot_eager'"):
        apply_compile(config.build(), compile_config=CONFIG, parallel_dims=SINGLE)
    trainer = llama3_debugmodel()
    trainer.override = OverrideConfig(imports=[f"{NAME}.flex_attention", (f"{NAME}.optimizers", {"format": "int8"})])
    apply_overrides(trainer.override, trainer)
    model = trainer.model_spec.model.build()
    found = [layer.attention.inner_attention for layer in model.layers.values()]
    assert not any(isinstance(each, FlexAttention) for each in found)
    assert all(type(each).forward is FlexAttention.forward for each in found)
    first = trainer.model_spec.model.layers[0].attention.inner_attention
    assert isinstance(first, FlexAttention.Config)  # by which torchtitan makes the block masks
    apply_compile(model, compile_config=CONFIG, parallel_dims=SINGLE)
    assert trainer.optimizer.optimizer_factory_kwargs_by_name["AdamW"] == {"format": "int8"}


def test_its_optimizer_container_holds_and_saves_our_states(caplog: pytest.LogCaptureFixture) -> None:
    """The flat state that torchtitan's checkpoints hold; the next step after loading it is the same bit for bit."""
    caplog.set_level(logging.INFO, "fp8compile")

    def made() -> tuple[Any, Any]:
        model = llama(layers=1)
        return model, ours.optimizers(default_adamw(lr=1e-3), compiled=False).build(model_parts=[model])

    def step(model: Any, optimizer: Any) -> None:
        model(TOKENS, positions=PLACES).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, container = made()
    assert [type(each) for each in container.optimizers] == [fp8compile.optim.AdamW]
    step(model, container)
    assert any("no graph of this Llama3Model was compiled by fp8compile" in text for text in caplog.messages)
    parameters, states = copy.deepcopy((model.state_dict(), container.state_dict()))
    again, loaded = made()
    again.load_state_dict(parameters)
    loaded.load_state_dict(states)
    step(model, container)
    step(again, loaded)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not all(torch.equal(parameters[name], p) for name, p in model.named_parameters())


def traced_step() -> tuple[Any, Any, tuple[Any, ...]]:
    """torchtitan's model of one layer, its forward, loss and backward as one graph, and what that is called with."""
    model = llama(layers=1)
    annotate_module_fqns(model)
    loss = CrossEntropyLoss.Config(global_vocab_size=2048).build()
    called = (TOKENS, TOKENS.roll(-1, 1), torch.tensor(256.0), {"positions": PLACES})
    return model, minimal_fx_tracer(make_fwd_bwd_step(model, loss), module=model)(*called), called


def test_graph_trainer_gets_the_gradients_that_the_backend_gives() -> None:
    """Both place the same codecs, so a gradient is as far from the exact one, and the two are far nearer to each other."""
    model, traced, called = traced_step()
    exact = run_traced(traced, module=model)(*called)
    names = [node.name for node in traced.gm.graph.nodes if node.op == "placeholder"]
    done = Fp8Passes(EXACT)
    traced.gm = titan_passes.apply_graph_passes(
        traced.gm, traced.example_inputs, [titan_passes.canonicalize_graph_pass, done.fp8_linears_pass]
    )
    assert [node.name for node in traced.gm.graph.nodes if node.op == "placeholder"] == names
    fp8 = run_traced(traced, module=model)(*called)

    whole = llama(layers=1)
    compiled = torch.compile(whole, backend="fp8compile", options={"recipe": EXACT})
    logits = compiled(TOKENS, positions=PLACES)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), called[1].flatten(), reduction="sum") / 256
    loss.backward()
    assert done.report is not None
    linears = fp8compile.report(compiled).linears
    assert sorted((m.origin.module, m.direction, m.formats) for m in done.report.linears) == sorted(
        (m.origin.module, m.direction, m.formats) for m in linears
    )
    assert len(linears) == 15  # three products of five linears; the head stays
    for name, (a, b, c) in {
        name: (exact[i + 1], fp8[i + 1], p.grad) for i, (name, p) in enumerate(whole.named_parameters())
    }.items():
        assert decibels(a, b) > 18, (
            name
        )  # E5M2 gradients: 2 bits of mantissa, an error of 1/8 at most, 1/14 in the mean
        assert decibels(c, b) > decibels(a, b) + 10, name


@pytest.mark.parametrize(
    ("policy", "linears", "kept"),
    [("save", False, 0.46), ("default", False, 0.77), ("default", True, 0.77), ("full", True, 0.96)],
)
def test_what_its_memory_policy_keeps_is_stored_as_codes(policy: str, linears: bool, kept: float) -> None:
    """The logits in FP32 stay, 2.1 MB of all: their exponential must be exact. In regions that its Inductor compiles."""
    model, traced, called = traced_step()
    for (
        node
    ) in traced.gm.graph.nodes:  # sums of gradients pass for the loss, and end its search for what to recompute
        if node.target is torch.ops.aten.add.Tensor and node.meta.get("autograd_backward"):
            node.meta["custom"] = {"module_fqn": ""}
    exact = run_traced(traced, module=model)(*called)
    done = Fp8Passes(
        Recipe(linears={"emulate": True, "mode": "tensorwise"} if linears else "off", debug={"codegen": "eager"})
    )
    recomputing = [functools.partial(tag_sac_policy, policy_fn=POLICIES.get(policy)), selective_activation_remat_pass]
    traced.gm = titan_passes.apply_graph_passes(
        traced.gm,
        traced.example_inputs,
        [
            titan_passes.canonicalize_graph_pass,
            done.fp8_linears_pass,
            *(recomputing if policy != "save" else []),
            done.fp8_saved_pass,
            done.fp8_regions_pass,
            titan_passes.regional_inductor_pass,
        ],
    )
    found = run_traced(traced, module=model)(*called)
    assert done.report is not None and not done.report.remarks
    assert done.report.saved_bytes < kept * done.report.saved_bytes_plain
    assert len(done.report.linears) == 15 * linears
    assert torch.equal(exact[0], found[0]) or linears
    for a, b in zip(exact[1:], found[1:], strict=True):
        assert decibels(a, b) > (18 if linears else 38)


def test_its_pass_pipeline_has_ours_among_its_own() -> None:
    assert "fp8compile" in PASS_PIPELINE_REGISTRY  # since the overrides' module was imported
    register_pipeline(EXACT)
    config = graph_trainer_llama3_debugmodel()
    traced = mock.Mock(num_static_inputs=1, tensor_input_indices=[0], state_fqns=[])
    found = [titan_passes._get_pass_name(p) for p in PASS_PIPELINE_REGISTRY["fp8compile"](traced, config)]
    default = [titan_passes._get_pass_name(p) for p in titan_passes.construct_default_graph_passes(traced, config)]
    assert [name for name in found if not name.startswith("fp8_")] == default
    for first, second in (
        ("canonicalize_graph_pass", "fp8_linears_pass"),
        ("selective_activation_remat_pass", "fp8_saved_pass"),
        ("fp8_regions_pass", "regional_inductor_pass"),
    ):
        assert found[found.index(first) + 1] == second
    config.compile.precompile_artifact_dir = "somewhere"
    with pytest.raises(ValueError, match="precompile_artifact_dir"):
        PASS_PIPELINE_REGISTRY["fp8compile"](traced, config)


def test_the_example_keeps_up_with_its_twin() -> None:
    outcome = beside_its_twin(example, steps=10)
    assert_parity(outcome)
    report = outcome.report
    assert len(report.linears) == 30
    assert any("which FP8COMPILE_RECIPE names" in remark for remark in report.remarks)
