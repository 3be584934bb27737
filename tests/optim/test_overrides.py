"""Overrides of the state format: on parameters and modules, through copies, pickles and replaced parameters."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8compile.optim import overrides
from fp8compile.optim.overrides import overridden, override, override_in


def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4))


def test_nothing_is_overridden_unless_asked_for():
    net = model()
    assert override_in(net) == {}
    assert overridden(net[0].weight) is None


def test_a_parameter_is_overridden_alone():
    net = model()
    override(net[0].weight, state_format="fp32")
    assert overridden(net[0].weight) == "fp32"
    assert override_in(net) == {"0.weight": "fp32"}


def test_a_module_is_overridden_with_its_submodules():
    net = model()
    override(net[1], state_format="bf16")
    assert override_in(net) == dict.fromkeys(["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"], "bf16")


def test_parameters_added_later_are_not_touched():
    net = model()
    override(net[1], state_format="bf16")
    net[1][0].gain = nn.Parameter(torch.ones(8))
    net[1].append(nn.Linear(8, 8))
    assert not {"1.0.gain", "1.2.weight"} & override_in(net).keys()


def test_single_parameters_of_a_module_are_overridden_by_name():
    net = model()
    override(net[1], state_format="fp32", names=("0.weight", "1.bias"))
    assert override_in(net) == {"1.0.weight": "fp32", "1.1.bias": "fp32"}
    override(net[0], state_format="bf16", names="weight")  # one name is as good as a tuple of it
    assert overridden(net[0].weight) == "bf16"


@pytest.mark.parametrize("state_format", [("bf16", "fp32"), ["bf16", "fp32"]])
def test_moments_can_have_formats_of_their_own(state_format):
    net = model()
    override(net[0], state_format=state_format)
    assert override_in(net) == dict.fromkeys(["0.weight", "0.bias"], ("bf16", "fp32"))


def test_the_last_call_wins():
    net = model()
    override(net, state_format="bf16")
    override(net[0].weight, state_format="fp32")
    assert overridden(net[0].weight) == "fp32"
    override(net[0], state_format="e4m3")
    assert override_in(net[0]) == {"weight": "e4m3", "bias": "e4m3"}
    assert overridden(net[2].weight) == "bf16"


# ------------------------------------------------------------------------------------------- shared parameters


def test_a_shared_parameter_is_overridden_under_each_of_its_names():
    net = model()
    net[1][0].bias = net[0].bias
    override(net[0], state_format="fp32")
    assert override_in(net) == {"0.weight": "fp32", "0.bias": "fp32", "1.0.bias": "fp32"}


def test_the_last_call_wins_for_shared_parameters_too():
    net = model()
    net[1][0].bias = net[0].bias
    override(net[0], state_format="fp32")
    override(net[1], state_format="bf16")
    assert overridden(net[0].bias) == "bf16"
    override(net[0], state_format="fp32")
    assert overridden(net[0].bias) == "fp32"


def test_modules_that_come_to_share_a_parameter_with_different_formats_must_be_asked_again():
    net = model()
    override(net[0], state_format="fp32")
    override(net[1], state_format="bf16")
    net[1][0].bias = net[0].bias
    with pytest.raises(
        ValueError, match=r"shape \(8,\) has several state formats.*'bf16', 'fp32'.*override\(parameter"
    ):
        overridden(net[0].bias)
    override(net[0].bias, state_format="e4m3")
    assert overridden(net[0].bias) == "e4m3"


# ------------------------------------------------------------------------------------------- copies and replacement

MARKED = dict.fromkeys(["1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"], "fp32")


def marked():
    net = model()
    override(net[1], state_format="fp32")
    return net


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_overrides_of_its_own(copied):
    net = marked()
    twin = copied(net)
    assert override_in(twin) == MARKED
    override(twin, state_format="bf16")
    assert override_in(net) == MARKED
    del net
    gc.collect()
    assert set(override_in(twin).values()) == {"bf16"}


def test_a_shallow_copy_may_outlive_its_original():
    net = marked()
    twin = copy.copy(net[1][0])
    del net
    gc.collect()
    override(copy.deepcopy(twin), state_format="bf16")
    override(twin, state_format="bf16")
    assert override_in(twin) == {"weight": "bf16", "bias": "bf16"}


def replaced_one_by_one(net):
    for module in net.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(p.detach().clone()))
    return net


@pytest.mark.parametrize(
    "change",
    [
        replaced_one_by_one,
        lambda net: net.bfloat16(),
        lambda net: net.to_empty(device="meta"),
        lambda net: net.load_state_dict(model().state_dict(), assign=True) and net,
    ],
    ids=["setattr", "dtype", "meta", "assign"],
)
def test_overrides_of_modules_hold_for_whatever_parameter_stands_there(change):
    net = marked()
    net = change(net) or net
    assert override_in(net) == MARKED
    assert {name for name, p in net.named_parameters() if overridden(p)} == MARKED.keys()


def test_overrides_hold_through_fully_shard(tmp_path):
    net = marked()
    before = net[1][0].weight
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(net[1], mesh=mesh)
        fully_shard(net, mesh=mesh)
        assert net[1][0].weight is not before
        assert override_in(net) == MARKED
        net(torch.randn(2, 4)).sum().backward()
        assert override_in(net) == MARKED
        assert overridden(net[1][0].weight) == "fp32"
        override(net[0].weight, state_format="bf16")
        assert override_in(net) == {**MARKED, "0.weight": "bf16"}
    finally:
        dist.destroy_process_group()


def test_overrides_are_seen_through_a_compiled_model():
    net = torch.compile(marked(), backend="eager")
    assert override_in(net) == {f"_orig_mod.{name}": "fp32" for name in MARKED}
    override(net, state_format="bf16")
    assert override_in(net._orig_mod) == {name: "bf16" for name, _ in model().named_parameters()}


def test_marking_leaves_the_state_dict_alone_and_keeps_nothing_alive():
    net = marked()
    assert net.state_dict().keys() == model().state_dict().keys()
    override(net[0].weight, state_format="fp32")
    gone = weakref.ref(net[1]), weakref.ref(net[1][0].weight), weakref.ref(net[0].weight)
    del net  # no cycle is left to the garbage collector: memory comes back at once
    assert [ref() for ref in gone] == [None] * 3
    gc.collect()
    assert not any(marks.owner() is None for marks in overrides._marked)


# ------------------------------------------------------------------------------------------- errors


def test_a_format_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="fp9"):
        override(model(), state_format="fp9")
    with pytest.raises(ValueError, match=r"fp32.*fp32.*fp32"):
        override(model(), state_format=("fp32", "fp32", "fp32"))


def test_the_check_can_be_another():
    def check(state_format):
        if state_format != "own":
            raise ValueError(f"no {state_format!r}: there is own")

    net = model()
    override(net[0], state_format="own", check=check)
    assert overridden(net[0].bias) == "own"
    with pytest.raises(ValueError, match="no 'fp32': there is own"):
        override(net[0], state_format="fp32", check=check)
    with pytest.raises(ValueError, match=r"\('a', 'b', 'c'\): pass one format, or two"):
        override(net[0], state_format=("a", "b", "c"), check=lambda _: None)


def test_a_name_that_the_module_lacks_is_answered_with_those_it_has():
    with pytest.raises(ValueError, match="this Linear has no parameter 'wieght'; it has weight, bias"):
        override(nn.Linear(2, 2), state_format="fp32", names=("wieght",))


def test_what_has_no_parameters_is_declined():
    with pytest.raises(ValueError, match="this ReLU has no parameters: mark the module that does"):
        override(nn.ReLU(), state_format="fp32")
    with pytest.raises(ValueError, match=r"not a str: pass model\.lm_head"):
        override("lm_head", state_format="fp32")
    with pytest.raises(ValueError, match=r"names=\('weight',\) are for a module"):
        override(nn.Linear(2, 2).weight, state_format="fp32", names=("weight",))
