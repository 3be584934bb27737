"""One canary for each private torch API in fp8compile/torch_private.py: says which one moved, and what we need of it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from fp8compile import torch_private as private


@pytest.mark.parametrize("name", private.__all__)
def test_it_is_still_there(name: str) -> None:
    assert hasattr(private, name)


def parameters(fn: object) -> set[str]:
    return set(inspect.signature(fn).parameters)  # type: ignore[arg-type]


def test_compile_fx_takes_an_inner_compiler_and_patches() -> None:
    assert {"inner_compile", "config_patches"} <= parameters(private.compile_fx)


def test_the_partitioner_takes_what_inductor_hands_over() -> None:
    wanted = {"compiler", "num_fwd_outputs", "static_lifetime_input_indices"}
    assert wanted <= parameters(private.min_cut_rematerialization_partition)


def test_the_hooks_and_options_we_set_exist() -> None:
    for option in ("joint_custom_post_pass", "custom_partitioner_fn", "post_grad_fusion_options", "disabled_passes"):
        assert hasattr(private.inductor_config, option), option
    assert hasattr(private.functorch_config, "ban_recompute_materialized_backward")
    assert callable(private.functorch_config.save_config_portable)


def test_the_structured_trace_goes_to_handlers_with_a_folder(tmp_path: Path) -> None:
    """dump.tracing relies on: torch's handler on trace_log has a root_dir where, and only where, it writes."""
    kind = torch._logging._internal.LazyTraceHandler
    assert kind(None).root_dir is None
    handler = kind(str(tmp_path))
    handler.setFormatter(torch._logging._internal.TorchLogsFormatter(trace=True))
    private.trace_log.addHandler(handler)
    try:
        private.trace_structured("artifact", metadata_fn=lambda: {"name": "seen"}, payload_fn=lambda: "a text")
    finally:
        private.trace_log.removeHandler(handler)
        handler.close()
    [written] = tmp_path.iterdir()
    assert '"seen"' in written.read_text() and "a text" in written.read_text()


def test_the_observer_can_disable_a_pass_by_name() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x)
    with private.inductor_config.patch(disabled_passes="some_pass"):
        assert private.GraphTransformObserver(gm, "some_pass", subsystem="x").apply_gm_pass(lambda _: 1) is None
    assert private.GraphTransformObserver(gm, "some_pass", subsystem="x").apply_gm_pass(lambda _: 1) == 1


def test_saved_values_come_and_go_by_position_with_descriptions() -> None:
    """Split relies on: the forward returns (outputs, values, sizes), the backward takes (sizes, values, tangents)."""
    from fp8compile.split import Split

    seen = {}

    class Look(private.CustomPartitionerFn):  # type: ignore[misc]
        def uuid(self) -> None:
            return None

        def __call__(self, gm, joint_inputs, **kwargs):  # type: ignore[no-untyped-def]
            fw, bw = private.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            split = Split(fw, bw, kwargs["num_fwd_outputs"], kwargs["static_lifetime_input_indices"])
            seen["names"] = [(e.made.name, e.used.name) for e in split.edges]
            seen["needs_grad"] = [n.name for n in split.inputs if n in split.needs_grad]
            seen["static"] = len(split.static)
            return fw, bw

    model = torch.nn.Linear(8, 8)

    def backend(gm, inputs):  # type: ignore[no-untyped-def]
        return private.compile_fx(gm, inputs, config_patches={"custom_partitioner_fn": Look()})

    fn = torch.compile(lambda x: torch.sigmoid(model(x)), backend=backend, dynamic=True)
    fn(torch.randn(4, 8)).sum().backward()
    assert seen["names"] and all(made == used for made, used in seen["names"])
    assert len(seen["needs_grad"]) == 2 and seen["static"] == 2, seen
