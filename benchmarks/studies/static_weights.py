"""Bytes that encode the weights of a layer where they are cached: counted in kernels generated for an H100, without one.

by kernels of their own, once a step     read twice, both layouts written       ``bytes_to_encode``
by the optimizer's step                  codes by rows there, turned behind it  ``added_by_codes``, of an element
"""

from __future__ import annotations

import functools

import torch

from tests.sm90.layers import Layer

BY_THE_STEP = "_by_the_step"  # behind a pipeline's name: the optimizer's step writes the codes of weights


def encoded(layer: Layer, pipeline: str) -> dict[str, float]:
    """Bytes that encode a layer's weights once a step, where they are cached: by kernels of their own, ""; by the step."""
    if "cached" not in pipeline:
        return {"": 0.0}
    found = {"": bytes_to_encode(layer)}
    return found | ({BY_THE_STEP: added_by_codes() * weights_of(layer)} if pipeline.endswith("merged") else {})


def weights_of(layer: Layer) -> int:
    """Elements of its matrices."""
    return sum(p.numel() for p in layer.build("meta").parameters() if p.dim() == 2)


@functools.cache
def bytes_to_encode(layer: Layer) -> float:
    """What generated kernels move to encode each weight of a layer in both layouts, as ``linears.cache_weights`` does."""
    from fp8compile.linears.weight_codes import Layouts, encode
    from tests.sm90.lowering import lower

    both = Layouts(torch.bfloat16, by_rows=True, transposed=True)
    found: dict[torch.Size, int] = {}
    shapes = [p.shape for p in layer.build("meta").parameters() if p.dim() == 2]
    for shape in set(shapes):
        weight = torch.empty(shape, dtype=torch.bfloat16)
        found[shape] = lower(functools.partial(encode, layouts=both), weight).only.num_bytes
    return float(sum(found[shape] for shape in shapes))


@functools.cache
def bytes_of_step() -> float:
    """A parameter's bytes in the step as generated."""
    from tests.sm90.optimizers import chunks_of, lowered_chunk
    from tests.sm90.run_optimizer import CASES

    case = CASES["BF16, rounded stochastically"]
    chunks, _ = chunks_of(case.build())
    return float(sum(lowered_chunk(chunk)[0].num_bytes for chunk in chunks) / (case.shape[0] * case.shape[1]))


@functools.cache
def added_by_codes() -> float:
    """What a parameter's bytes grow by where the step writes its codes by rows, and what finishes it turns them."""
    from tests.sm90.run_optimizer import CASES
    from tests.sm90.step_codes import lowered_with_codes

    case = CASES["BF16, rounded stochastically"]
    found = lowered_with_codes(case)
    return (found.step.num_bytes + found.finish.num_bytes) / (case.shape[0] * case.shape[1]) - bytes_of_step()
