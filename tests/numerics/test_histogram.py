"""Statistics of gradients: every 16-bit value, values that round to an edge, and the scale that they ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8compile.numerics import histogram
from fp8compile.numerics.formats import FP16_MAX
from fp8compile.numerics.histogram import (
    AMAX,
    COLUMNS,
    EDGES,
    INF,
    NAN,
    fold,
    statistics,
)

SIXTEEN = (torch.float16, torch.bfloat16)


def every(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def classes(x: Tensor) -> np.ndarray:
    """Of each value [n] the columns it counts in, [n, 6]: the definition, in float64, one condition each."""
    v = np.abs(x.double().numpy())
    with np.errstate(invalid="ignore"):
        return np.stack(
            [v <= 8192, (v > 8192) & np.isfinite(v), np.isinf(v), np.isnan(v), v == 0, (v > 0) & (v < 2.0**-14)], 1
        )


def expected(x: Tensor) -> list[float]:
    v = np.abs(x.double().numpy().ravel())
    finite = v[np.isfinite(v)]
    return [*classes(x.flatten()).sum(0).astype(float).tolist(), float(finite.max()) if finite.size else 0.0]


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_every_value(dtype: torch.dtype) -> None:
    x = every(dtype)
    assert statistics(x).tolist() == expected(x)
    kinds, which = np.unique(classes(x), axis=0, return_inverse=True)
    for i in range(len(kinds)):  # values of one kind by themselves, so that no two errors cancel
        of_kind = x[torch.from_numpy(which.ravel() == i)]
        assert statistics(of_kind).tolist() == expected(of_kind)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_float32_that_rounds_to_an_edge(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two neighbours of the dtype: the tie and its FP32 neighbours, judged as what they are rounded to."""
    values = every(dtype).float()
    values = values[values.isfinite()].sort().values
    top = values[-1].double() + (values[-1].double() - values[-2].double()) / 2
    ties = torch.cat([((values[1:].double() + values[:-1].double()) / 2).float(), top.float().reshape(1)])
    ties = torch.cat([ties, -ties])
    inf = torch.tensor(torch.inf)
    x = torch.cat(
        [values, ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf), torch.tensor([inf, torch.nan])]
    )
    monkeypatch.setitem(histogram.EDGES, torch.float32, EDGES[dtype])
    kinds, which = np.unique(classes(x.to(dtype)), axis=0, return_inverse=True)
    assert len(kinds) == 6  # zero, subnormal, small, large, inf, nan
    for i in range(len(kinds)):
        of_kind = x[torch.from_numpy(which.ravel() == i)]
        assert statistics(of_kind)[:AMAX].tolist() == expected(of_kind.to(dtype))[:AMAX], kinds[i]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 5), (3, 1025), (2, 3, 4, 600), (5, 1, 1)])
def test_shapes_and_strides(shape: tuple[int, ...]) -> None:
    x = (torch.randn(shape) * torch.randint(-20, 20, shape).float().exp2()).half()
    assert statistics(x).tolist() == expected(x)
    assert statistics(x.mT if x.dim() > 1 else x).tolist() == expected(x)


def test_counts_are_exact_where_float32_is_not() -> None:
    x = torch.zeros(1, dtype=torch.float16).expand(2**24 + 3)
    assert statistics(x)[0] == 2**24 + 3


numbers = st.lists(st.floats(width=16), max_size=40)


@settings(deadline=None)
@given(numbers, numbers)
def test_fold_is_the_statistics_of_both(a: list[float], b: list[float]) -> None:
    x, y = (torch.tensor(each, dtype=torch.float16) for each in (a, b))
    assert fold(statistics(x), statistics(y)).tolist() == statistics(torch.cat([x, y])).tolist()
    assert fold(statistics(x), statistics(y)).tolist() == fold(statistics(y), statistics(x)).tolist()


def test_saturate() -> None:
    x = every(torch.float16)
    clipped = histogram.saturate(x, torch.tensor(FP16_MAX))
    assert clipped.dtype == torch.float16
    assert torch.equal(clipped.isnan(), x.isnan()) and not clipped.isinf().any()
    finite = x.isfinite()
    assert torch.equal(clipped[finite], x[finite])
    assert clipped[x == torch.inf] == FP16_MAX and clipped[x == -torch.inf] == -FP16_MAX
    free = histogram.saturate(x, torch.tensor(torch.inf))
    assert torch.equal(free.nan_to_num(0, 1, -1), x.nan_to_num(0, 1, -1)) and torch.equal(free.isinf(), x.isinf())


def test_columns() -> None:
    assert COLUMNS[INF] == "inf" and COLUMNS[NAN] == "nan" and COLUMNS[AMAX] == "amax"
