"""Script, under ``TRITON_INTERPRET=1``: generated kernels, whole and broken, against eager. Prints JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8compile.numerics import E4M3, Codec, Groupwise

from . import fake_h100, interpreter, swiglu
from .lowering import lower
from .measures import print_json

FULL, TAIL = (6, 128), (1, 461)  # 6 groups; 3 groups and a short one of 77
TAIL_CASE = "a short tail"


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Normal data, one value in a hundred 200 times larger, so that GroupwiseBest takes both formats."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < 0.01, 200 * x, x).bfloat16()


def cases() -> dict[str, Tensor]:
    normal, zeros, inf, nan = (sample(*FULL) for _ in range(4))
    zeros[2] = 0
    inf[1, 5], inf[4, 127] = torch.inf, -torch.inf
    nan[3, 77] = torch.nan
    tail = sample(*TAIL)
    tail[-1, -1] = 400  # the short group's largest
    extremes = sample(*FULL) * torch.tensor([1e-38, 1e-30, 1.0, 1e30, 3e35, 1e-41]).bfloat16()[:, None]
    return {
        "normal": normal,
        "an all-zero group": zeros,
        "groups with inf": inf,
        "a group with NaN": nan,
        "extreme magnitudes": extremes,
        TAIL_CASE: tail,
    }


# What is flipped in the generated source, and a case that must notice. Bounds only shrink: the interpreter's
# loads and stores are real.
MUTATIONS: dict[str, tuple[str, str, str]] = {
    "another scale constant": ("0.002232142857142857", "0.002", "normal"),
    "scale rounded down": (" 32768,", " 0,", "normal"),
    "no saturation below": ("-448.0", "-384.0", "normal"),
    "inf not noticed": ('float("inf")', 'float("nan")', "normal"),
    "inf in a finite scale": ('float("nan")', "1.0", "groups with inf"),
    "groups overlap": ("128*x0", "127*x0", "normal"),
    "a group is masked out": ("xindex < xnumel", "xindex < xnumel - 1", "normal"),
    "the tail begins late": ("tl.full([1], 384, tl.int64)", "tl.full([1], 400, tl.int64)", TAIL_CASE),
    "the tail under its neighbour's scale": ("in_ptr1 + (3)", "in_ptr1 + (2)", TAIL_CASE),
}


def differing_bytes(ours: Tensor, expected: Tensor) -> Tensor:
    """How many bytes differ in each row."""
    assert ours.dtype == expected.dtype and ours.shape == expected.shape
    differs = ours.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    return differs.reshape(len(ours), -1).sum(-1)


def all_differing_bytes(ours: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    return sum(int(differing_bytes(*pair).sum()) for pair in zip(ours, expected, strict=True))


def run(fn: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...]:
    """``fn`` as generated and interpreted."""
    outputs = lower(fn, *args, execute=True).outputs
    return outputs if isinstance(outputs, tuple) else (outputs,)


def codec_report(codec: Codec) -> dict[str, dict[str, int]]:
    """Bytes by which codes, scales and decoded values differ from eager's, for every case."""
    result = {}
    full = cases()
    tail = full.pop(TAIL_CASE)
    together = differing_rows(codec, torch.cat([*full.values()]))  # a row is a group: one kernel for all
    for i, case in enumerate(full):
        rows = slice(i * FULL[0], (i + 1) * FULL[0])
        result[case] = {what: int(differing[rows].sum()) for what, differing in together.items()}
    alone = differing_rows(codec, tail)
    result[TAIL_CASE] = {what: int(differing.sum()) for what, differing in alone.items()}
    return result


def differing_rows(codec: Codec, x: Tensor) -> dict[str, Tensor]:
    codes, inv_scale = codec.encode(x)
    our_codes, our_scale = run(codec.encode, x)
    (x_hat,) = run(lambda codes, inv_scale: codec.decode(codes, inv_scale, x.dtype), codes, inv_scale)
    return {
        "codes": differing_bytes(as_bytes(our_codes, inv_scale), as_bytes(codes, inv_scale)),
        "scales": differing_bytes(our_scale, inv_scale),
        "decoded": differing_bytes(x_hat, codec.decode(codes, inv_scale, x.dtype)),
    }


def as_bytes(codes: Tensor, inv_scale: Tensor) -> Tensor:
    """The codes, but without their sign in a group whose scale is NaN: what torch's cast on the CPU makes of
    a NaN is 0xff there, what the GPU's makes is 0x7f."""
    unsigned = codes.view(torch.uint8)
    if not inv_scale.isnan().any():
        return unsigned
    assert len(codes) == len(inv_scale), "a case with NaN has one group per row"
    return torch.where(inv_scale.isnan(), unsigned & 0x7F, unsigned)


def mutation_report() -> dict[str, int]:
    """Bytes of codes and scales by which a kernel with one thing flipped differs from eager."""
    codec, result = Groupwise(E4M3), {}
    by_shape = sorted(MUTATIONS.items(), key=lambda item: item[1][2] == TAIL_CASE)
    shape: torch.Size | None = None
    for name, (before, after, case) in by_shape:
        x, flipped = cases()[case], 0
        if x.shape != shape:
            lowered, shape = lower(codec.encode, x, execute=True), x.shape

        def flip(kernel: str, source: str, before: str = before, after: str = after) -> str:
            nonlocal flipped
            flipped += source.count(before)
            return source.replace(before, after)

        outputs = lowered.rerun(x, rewrite=flip)
        assert flipped, f"{name}: the generated source has no {before!r}; flip something else"
        result[name] = all_differing_bytes(outputs, codec.encode(x))
    return result


def swiglu_report(codec: Codec) -> dict[str, float]:
    """The fused kernels: bytes of codes and scales that differ, and errors relative to the largest value."""
    torch.manual_seed(0)
    x, dz = torch.randn(8, 64).bfloat16(), torch.randn(8, 256).bfloat16()
    w_gate, w_up = (torch.randn(2, 64, 256) / 8).bfloat16()
    z, *stored = swiglu.forward(codec)(x, w_gate, w_up)
    our_z, *our_stored = run(swiglu.forward(codec), x, w_gate, w_up)
    expected = swiglu.backward(codec)(*stored, dz)
    ours = run(swiglu.backward(codec), *stored, dz)
    return {
        "stored": all_differing_bytes(our_stored, stored),
        "forward": relative_error(our_z, z),
        "backward": max(map(relative_error, ours, expected)),
    }


def relative_error(ours: Tensor, expected: Tensor) -> float:
    return float((ours.float() - expected.float()).abs().max() / expected.float().abs().max())


def report() -> dict[str, Any]:
    fake_h100.install()
    interpreter.install()
    torch.set_num_threads(1)
    return {
        "codecs": {name: codec_report(codec) for name, codec in swiglu.CODECS.items()},
        "swiglu": swiglu_report(Groupwise(E4M3)),
        "mutations": mutation_report(),
    }


if __name__ == "__main__":
    print_json(report)
