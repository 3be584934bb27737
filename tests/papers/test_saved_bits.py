"""GACT's way: which tensors are encoded, in how many bits, and that the choice of bits is the best there is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from benchmarks.papers import gact
from benchmarks.papers.saved_bits import CHOICES, SavedTensors, choose_bits, nbytes, noise
from fp8compile.numerics.few_bits import FewBits
from fp8compile.numerics.metrics import sqnr


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))


def gradients(net: nn.Module, x: Tensor, saved: SavedTensors) -> Tensor:
    with saved.encoding():
        loss = net(x).square().mean()
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_that_of_exhaustive_search(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sensitivities = (10.0 ** (4 * torch.rand(5, generator=generator))).tolist()
    shapes = (128 * torch.randint(1, 40, (5, 1), generator=generator)).tolist()

    def total(bits: tuple[int, ...]) -> float:
        return sum(s * noise(b) for s, b in zip(sensitivities, bits, strict=True))

    def taken(bits: tuple[int, ...]) -> int:
        return sum(nbytes(n, b) for n, b in zip(shapes, bits, strict=True))

    every = list(itertools.product(CHOICES, repeat=5))
    for of in (2, 3, 4, 6, 8):
        budget = taken((of,) * 5)
        found = choose_bits(sensitivities, shapes, budget)
        assert taken(found) <= budget
        assert total(found) == pytest.approx(min(total(b) for b in every if taken(b) <= budget), rel=1e-12)
        assert total(found) <= total((of,) * 5)


def test_a_budget_below_the_fewest_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bits for all take 36 bytes, more than the budget of 35"):
        choose_bits([1.0], [(128,)], 35)
    assert choose_bits([1.0], [(128,)], 36) == (2,)
    assert choose_bits([], [], 0) == ()


def test_what_is_more_sensitive_gets_more_bits() -> None:
    chosen = choose_bits([1.0, 100.0, 1e4], [(1280,)] * 3, 3 * nbytes((1280,), 4))
    assert chosen == tuple(sorted(chosen)) and chosen[0] < chosen[2]


def test_nothing_encoded_is_nothing_changed() -> None:
    net, x = model(), torch.randn(64, 64)
    loss = net(x).square().mean()
    plain = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])
    saved = SavedTensors(net, {})
    assert torch.equal(gradients(net, x, saved), plain)
    assert {math.prod(shape) for shape in saved.shapes} == {4096} and 5 <= len(saved.shapes) <= 7


def test_numbers_are_the_same_in_every_step_and_weights_have_none() -> None:
    """Weights of the two linear layers have 4,096 elements as the activations do, and are saved too."""
    net, x = model(), torch.randn(64, 64)
    saved = SavedTensors(net, {})
    with saved.encoding():
        net(x).square().mean()
        first = list(saved.shapes)
        net(x).square().mean()
    assert saved.shapes == first
    frozen = [p.untyped_storage().data_ptr() for p in net.parameters()]
    assert not any(saved._may_be_encoded(t) for p in net.parameters() for t in (p, p.t() if p.dim() == 2 else p))
    assert frozen


def test_the_first_saved_tensor_is_the_input_and_only_its_gradient_changes() -> None:
    net, x = model(), torch.randn(64, 64)
    exact = gradients(net, x, SavedTensors(net, {}))
    coded = gradients(net, x, SavedTensors(net, {0: 4}))
    weight = net[0].weight.numel()  # type: ignore[union-attr,operator]
    assert not torch.equal(coded[:weight], exact[:weight]) and torch.equal(coded[weight:], exact[weight:])
    codec = FewBits(4, 128, "stochastic")
    decoded = codec.decode(*codec.encode(x), x.shape, x.dtype)
    dy = torch.autograd.grad(net(x).square().mean(), net[0].bias)[0]  # type: ignore[union-attr,arg-type]
    assert dy.shape == (64,) and sqnr(x, decoded) < 40
    assert 10 < sqnr(exact[:weight], coded[:weight]) < 40


def test_more_bits_are_better() -> None:
    net, x = model(), torch.randn(256, 64)
    exact = gradients(net, x, SavedTensors(net, {}))
    db = [sqnr(exact, gradients(net, x, SavedTensors(net, dict.fromkeys(range(8), b)))) for b in CHOICES]
    assert db == sorted(db) and db[-1] > 35


def test_bytes_of_half_a_bit_lie_between() -> None:
    shapes = [(1280,), (640,)]
    below, above = (sum(nbytes(n, b) for n in shapes) for b in (2, 3))
    assert gact.budget_of(shapes, 2.5) == (below + above) // 2 and gact.budget_of(shapes, 3.0) == above
    assert gact.named(2.5) == "adaptive, 2.5 bits" and gact.named(3.0) == "adaptive, 3 bits"
    assert gact.bits_per_element("4 bits", [{}], shapes) == 4.25  # and 4 bytes for 128 elements
    assert gact.bits_per_element("a", [{"a": (2, 4)}, {"a": (4, 2)}], [(1280,), (1280,)]) == 3.25
