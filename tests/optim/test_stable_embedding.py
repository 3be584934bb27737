"""The stable embedding layer: its numbers, its 32-bit states, and what may be done to a module."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from fp8compile.optim.overrides import overridden, override, override_in
from fp8compile.optim.stable_embedding import StableEmbedding

ROWS, COLUMNS = 1000, 64
TOKENS = torch.tensor([[1, 2, 3], [0, 999, 2]])


def embedding(**options):
    torch.manual_seed(0)
    return StableEmbedding(ROWS, COLUMNS, **options)


def expected(module, tokens):
    """Lookup and LayerNorm from their definitions, in float64."""
    x = module.weight.detach().double()[tokens]
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    y = (x - mean) / (variance + module.norm.eps).sqrt()
    return y * module.norm.weight.detach().double() + module.norm.bias.detach().double()


def randomise_norm(module):
    with torch.no_grad():
        module.norm.weight.uniform_(0.5, 2)
        module.norm.bias.normal_()


# ------------------------------------------------------------------------------------------- numbers


def test_weight_is_xavier_uniform():
    # Uniform on (-a, a): variance a**2 / 3, and that of the sample variance of n such is 4 a**4 / (45 n).
    bound, n = math.sqrt(6 / (ROWS + COLUMNS)), ROWS * COLUMNS
    w = embedding().weight.detach().double()
    assert w.abs().max() <= bound
    assert abs(w.square().mean() - bound**2 / 3) < 6 * bound**2 * math.sqrt(4 / (45 * n))
    assert abs(w.mean()) < 6 * bound / math.sqrt(3 * n)


def test_every_token_comes_out_with_mean_0_and_variance_1():
    # Up to eps: the variance of y is v / (v + eps), v of the row; FP32 adds rounding of 2**-24 for each of the few steps.
    module = embedding()
    y, x = module(torch.arange(ROWS)).double(), module.weight.double()
    v = x.var(-1, unbiased=False)
    assert (y.mean(-1).abs() < 1e-6).all()
    torch.testing.assert_close(y.var(-1, unbiased=False), v / (v + module.norm.eps), rtol=1e-5, atol=0)


# A few roundings of 2**-24 on values of at most 8 in FP32; then one of the output: half an ulp, 2**-9 or 2**-12 relative.
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 0.0), (torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str
)
def test_output_is_the_norm_of_the_row_in_fp32_rounded_once_to_the_weights_dtype(dtype, rtol):
    module = embedding(dtype=dtype)
    randomise_norm(module)
    y = module(TOKENS)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected(module, TOKENS), rtol=rtol, atol=2e-6)


def test_float64_stays_float64():
    module = embedding(dtype=torch.float64)
    assert (module.norm.weight.dtype, module(TOKENS).dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(module(TOKENS), expected(module, TOKENS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_computed_in_fp32_though_its_parameters_were_converted_too(dtype):
    module = embedding().to(dtype)
    randomise_norm(module)
    assert module.norm.weight.dtype == dtype
    torch.testing.assert_close(module(TOKENS).double(), expected(module, TOKENS), rtol=2.0**-8, atol=2e-6)


def test_a_row_too_large_for_fp16_arithmetic_is_normalised():
    # Squares of 300 are past FP16's 65504.
    module = embedding(dtype=torch.float16)
    with torch.no_grad():
        module.weight.mul_(300 / module.weight.abs().max())
    torch.testing.assert_close(module(TOKENS).double(), expected(module, TOKENS), rtol=2.0**-11, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype):
    module = embedding()
    with torch.autocast("cpu", dtype):
        y = module(TOKENS)
    assert torch.equal(y, module(TOKENS))
    assert y.dtype == torch.float32


def test_padding_row_is_zero_comes_out_as_the_norms_bias_and_gets_no_gradient():
    module = embedding(padding_idx=0)
    randomise_norm(module)
    assert (module.weight[0] == 0).all()
    y = module(TOKENS)
    assert torch.equal(y[1, 0], module.norm.bias)
    y.square().sum().backward()
    assert (module.weight.grad[0] == 0).all()
    assert (module.weight.grad[1:4] != 0).any(-1).all()


def test_gradients_are_those_of_the_definition():
    module = embedding(dtype=torch.float64)
    weight = module.weight.detach().clone().requires_grad_()
    scale = torch.linspace(-1, 1, COLUMNS, dtype=torch.float64)
    (module(TOKENS) * scale).sum().backward()
    x = weight[TOKENS]
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + module.norm.eps).sqrt()
    (y * scale).sum().backward()
    torch.testing.assert_close(module.weight.grad, weight.grad, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------- states


def test_the_layer_asks_for_32_bit_states_of_its_weight_and_of_no_more():
    module = embedding()
    assert override_in(module) == {"weight": "fp32"}
    assert override_in(nn.Sequential(nn.Linear(2, 2), module)) == {"1.weight": "fp32"}


def test_an_override_can_take_it_back():
    module = embedding()
    override(module, state_format="bf16", names=("weight",))
    assert overridden(module.weight) == "bf16"


def test_a_tied_output_projection_has_32_bit_states_too():
    module, head = embedding(), nn.Linear(COLUMNS, ROWS, bias=False)
    head.weight = module.weight
    assert overridden(head.weight) == "fp32"


# ------------------------------------------------------------------------------------------- what may be done to it


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_a_copy_is_the_same_layer(copied):
    module = embedding(padding_idx=3)
    twin = copied(module)
    assert twin.weight is not module.weight
    assert overridden(twin.weight) == "fp32"
    assert torch.equal(twin(TOKENS), module(TOKENS))


def test_state_dict_has_the_names_of_bitsandbytes_and_loads():
    module, other = embedding(), StableEmbedding(ROWS, COLUMNS)
    randomise_norm(module)
    assert list(module.state_dict()) == ["weight", "norm.weight", "norm.bias"]
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(TOKENS), module(TOKENS))


def test_made_on_meta_it_is_initialised_by_reset_parameters():
    with torch.device("meta"):
        module = StableEmbedding(ROWS, COLUMNS, padding_idx=5)
    assert module.weight.is_meta
    assert module.norm.weight.is_meta
    module.to_empty(device="cpu")
    torch.manual_seed(0)
    for each in module.modules():
        each.reset_parameters()
    assert torch.equal(module.weight, embedding(padding_idx=5).weight)
    assert torch.equal(module(TOKENS), embedding(padding_idx=5)(TOKENS))
    assert overridden(module.weight) == "fp32"


def test_from_pretrained_takes_the_weight():
    weight = torch.randn(10, 8)
    module = StableEmbedding.from_pretrained(weight, freeze=False)
    assert torch.equal(module.weight, weight)
    assert module.weight.requires_grad
    assert overridden(module.weight) == "fp32"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_it_is_one_graph_and_the_same_output(dtype):
    module = embedding(dtype=dtype, padding_idx=0)
    randomise_norm(module)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True)
    # Inductor sums in another order; where that crosses a tie the output differs by one ulp of its dtype.
    rtol = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
    torch.testing.assert_close(compiled(TOKENS), module(TOKENS), rtol=rtol, atol=2e-6)


def test_compiled_it_has_the_same_gradients():
    module = embedding()
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True)
    for each in (module, compiled):
        each(TOKENS).square().sum().backward()
    # dx = rstd (g - mean(g) - y mean(g y)), g = 2 y the output's gradient: four sums of 64 terms with mean and variance,
    # each off by at most 64 * 2**-24 of its largest term, and at most 2 tokens share a row.
    rstd = (module.weight[TOKENS].var(-1, unbiased=False) + module.norm.eps).rsqrt().max().item()
    y = module(TOKENS).abs().max().item()
    atol = 2 * 4 * COLUMNS * 2.0**-24 * rstd * 2 * y * (1 + y**2)
    torch.testing.assert_close(compiled._orig_mod.weight.grad, module.weight.grad, rtol=0, atol=atol)
