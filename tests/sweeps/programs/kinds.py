"""Kinds of tensors: complex, sparse, 16 bit, 64 bit, mixed, autocast, scalars, empty; dynamic and data-dependent sizes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sweeps.registry import Run, Values, data, index, leaf, linear, program, projected

SIZES = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


@program(leaf(64, 256, dtype=torch.complex64))
def complex_products(m: Any, z: Tensor) -> Tensor:
    return (z * z.conj().roll(1, 0)).sin() * z


@program(leaf(64, 256), leaf(64, 256))
def polar_and_back(m: Any, r: Tensor, phase: Tensor) -> Tensor:
    z = torch.polar(r.exp(), phase)
    return (z * z.roll(1, 1)).abs() + (z + 2).angle()


@program(leaf(64, 256), model=linear(256, 256))
def a_filter_in_fourier_space(m: Any, x: Tensor) -> Tensor:
    f = torch.fft.rfft(m(x))
    return torch.fft.irfft(f * f.abs().sigmoid(), n=256).tanh() * x


@program(leaf(64, 256), model=linear(256, 256))
def complex_views_of_real_pairs(m: Any, x: Tensor) -> Tensor:
    z = torch.view_as_complex(m(x).view(64, 128, 2))
    turn = torch.polar(torch.ones(128), torch.linspace(0, 3, 128))
    return torch.view_as_real(z * turn).flatten(1).sigmoid()


@program(leaf(64, 256))
def a_sparse_adjacency(m: Any, x: Tensor) -> Tensor:
    rows, columns = torch.arange(64), torch.arange(64).roll(3)
    adjacency = torch.sparse_coo_tensor(torch.stack([rows, columns]), torch.linspace(0.1, 1, 64), (64, 64))
    return torch.sparse.mm(adjacency, x.sigmoid()).sin()


@program(index(512, 64, 16), model=lambda: nn.Embedding(512, 64, sparse=True))
def an_embedding_with_sparse_gradients(m: Any, i: Tensor) -> Tensor:
    return m(i).sigmoid()


@program(leaf(64, 256, dtype=torch.float64), model=lambda: nn.Linear(256, 256).double())
def float64(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m(x)) * x.sin()


@program(leaf(64, 256, dtype=torch.bfloat16), model=lambda: nn.Linear(256, 256).bfloat16())
def bfloat16(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x.sigmoid()


@program(leaf(64, 256, dtype=torch.float16), model=lambda: nn.Linear(256, 256).half())
def float16(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x.sigmoid()


@program(leaf(64, 256, dtype=torch.bfloat16), model=linear(256, 256))
def mixed_dtypes_promote(m: Any, x: Tensor) -> Tensor:
    y = m(x.float())
    return y.tanh().bfloat16() * x + (y.double() * x).sin().float()


@program(leaf(64, 256), model=linear(256, 256, 256))
def autocast_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.gelu(m(x))
    return y.float().sin() * x


@program(leaf(64, 256), model=linear(256, 256))
def autocast_switched_off_inside(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
        with torch.autocast("cpu", enabled=False):
            z = F.normalize(y.float(), dim=-1)
        return (z @ z.t()).sigmoid() @ y


@program(leaf(), leaf(64, 256))
def a_scalar_parameter(m: Any, temperature: Tensor, x: Tensor) -> Tensor:
    return (x * temperature.exp()).softmax(-1) * x


@program(leaf(0, 256), leaf(64, 256), model=linear(256, 256))
def an_empty_tensor_is_concatenated(m: Any, none: Tensor, x: Tensor) -> Tensor:
    return F.silu(m(torch.cat([none, x]))) * x + m(none).sum()


@program(leaf(0, 256), model=linear(256, 256))
def a_batch_without_rows(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)).sum()


def _sizes(run: Run, model: Any, x: Tensor) -> Values:
    outs = [run(x[:n]) for n in (64, 40, 33)]
    for out in outs:
        projected(out).backward()
    return {"out": outs}


@program(leaf(64, 256), model=linear(256, 256, 256), drive=_sizes, dynamic=True)
def dynamic_batch_sizes(m: Any, x: Tensor) -> Tensor:
    return F.silu(m(x)) * x


@program(leaf(64, 256), model=linear(256, 256), drive=_sizes)
def batch_sizes_that_become_dynamic(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return (y / y.abs().amax(0)).sin()


@program(leaf(64, 256), model=linear(256, 256), config=SIZES)
def rows_chosen_by_a_mask(m: Any, x: Tensor) -> Tensor:
    y = m(x)
    return F.gelu(y[y[:, 0] > 0]).sum(0)


@program(leaf(64, 256), model=linear(256, 256), config=SIZES)
def rows_chosen_by_nonzero_and_put_back(m: Any, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0).nonzero()[:, 0]
    return torch.zeros_like(x).index_add(0, rows, F.gelu(m(x[rows])))


@program(leaf(32, 256), index(4, 32), model=linear(256, 256), config=SIZES)
def rows_repeated_by_the_data(m: Any, x: Tensor, counts: Tensor) -> Tensor:
    return F.silu(m(x)).repeat_interleave(counts, 0).sin()


@program(leaf(64, 256), model=linear(256, 256), config=SIZES)
def a_size_read_from_the_data(m: Any, x: Tensor) -> Tensor:
    n = int((x[:, 0] > 0).sum().item())
    return F.silu(m(x)) * (n / 64)


@program(data(64, 256), model=lambda: nn.Linear(256, 256).bfloat16())
def a_float32_loss_of_a_16_bit_model(m: Any, x: Tensor) -> Tensor:
    return F.mse_loss(m(x.bfloat16()).float().tanh(), x)
