"""Kernels whose times were read on a GPU, beside what is predicted for them: what the constants of the prediction rest on.

Takes wrappers that Inductor generated on that card (``NAME-forward.py``, ``NAME-backward.py``) and the profiles of the same
runs in benchmarks/results. Each kernel that both hold, as often launched, is assembled for sm_90 and costed as in
tests/sm90/kernel_cost.py. Wants torch and Triton of the versions that generated them, as the same text assembles otherwise
with others. Kernels of channels-last codes are left out: their stores are scattered, which nothing predicts, and no kernel
has such stores any more.

python benchmarks/studies/kernels_read.py FOLDER [--json benchmarks/results/kernels-h200-read.json]
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.output import write_json
from tests.sm90 import fake_h100
from tests.sm90.kernel import Kernel, directions
from tests.sm90.kernel_cost import cost_of

RESULTS = Path(__file__).resolve().parents[1] / "results"
PROFILES = ("first-contact-h200-2a.jsonl", "first-contact-h200-4.jsonl", "first-contact-h200-5.jsonl")
ARMS: Mapping[str, str] = {  # a profile's job, and the name of its wrappers
    "setup-vit-inductor": "vit-plain",
    "setup-vit-default": "vit-default",
    "setup-bert-storage": "bert-storage",
    "setup-gpt2-storage": "gpt2-storage",
    "setup-resnet50-inductor": "resnet50-plain",
    "layer-default-7b": "layer7b-default",
}
SIGNATURE = re.compile(r"'(\w+)': '\*(\w+)'")
WIDTHS = {"fp32": 4, "fp64": 8, "bf16": 2, "fp16": 2, "i64": 8, "i32": 4, "i16": 2, "fp8e4nv": 1, "fp8e5": 1}
WIDTHS |= dict.fromkeys(("i8", "u8", "i1"), 1)


@dataclass(frozen=True)
class Wrapper:
    """Python that Inductor generated for a half of a graph."""

    text: str

    @property
    def kernels(self) -> Iterator[Kernel]:
        for name, source in re.findall(
            r"^(triton_\w+) = async_compile\.triton\('\1', '''(.*?)'''", self.text, re.M | re.S
        ):
            yield Kernel(name, source)

    def launches(self, name: str) -> list[list[str]]:
        """The arguments of each launch of a kernel."""
        return [given.split(", ") for given in re.findall(rf"^\s+{name}\.run\((.*)\)$", self.text, re.M)]

    @functools.cached_property
    def numels(self) -> dict[str, int]:
        """Elements of the buffers and inputs whose sizes it states."""
        allocated = re.findall(r"(\w+) = empty_strided_cuda\(\(([\d, ]*)\)", self.text)
        stated = re.findall(r"assert_size_stride\((\w+), \(([\d, ]*)\)", self.text)
        found = {
            name: math.prod(int(n) for n in size.split(",") if n.strip()) for name, size in (*stated, *allocated)
        }
        for name, other in re.findall(r"^\s+(\w+) = (\w+); del \w+  # reuse", self.text, re.M):
            if other in found:
                found[name] = found[other]
        return found

    def bytes_of(self, kernel: Kernel) -> int:
        """What a launch moves: each pointer once a direction; 0 where the wrapper does not state a buffer's size."""
        numels, given = self.numels, self.launches(kernel.name)[0]
        pointers = SIGNATURE.findall(kernel.source.split("'device'")[0])
        if not all(name in numels for name in given[: len(pointers)]):
            return 0
        sizes = zip(pointers, given, strict=False)
        return sum(
            WIDTHS[kind] * numels[name] * directions(kernel.source, pointer) for (pointer, kind), name in sizes
        )


def profiled() -> dict[str, list[tuple[str, int, float]]]:
    """``(kernel, launches, microseconds of one)`` of each run."""
    found = {}
    for name in PROFILES:
        for fact in map(json.loads, (RESULTS / name).read_text().splitlines()):
            if fact["job"] in ARMS and "kernels" in fact:
                found[fact["job"]] = [(kernel, int(n), us / n) for kernel, n, us in fact["kernels"]]
    return found


def rows_of(
    job: str, wrappers: Sequence[Wrapper], read: Sequence[tuple[str, int, float]]
) -> Iterator[dict[str, Any]]:
    """The kernels of one run that stand in one of its wrappers alone, launched as often as there."""
    held = collections.Counter(kernel.name for wrapper in wrappers for kernel in wrapper.kernels)
    times = {name: (n, us) for name, n, us in read}
    for wrapper in wrappers:
        for kernel in wrapper.kernels:
            n, us = times.get(kernel.name, (0, 0.0))
            if held[kernel.name] != 1 or not n or n != len(wrapper.launches(kernel.name)):
                continue
            if (num_bytes := wrapper.bytes_of(kernel)) and (cost := cost_of(kernel, num_bytes)) and not cost.spilled:
                timed = {"run": job, "kernel": kernel.name, "launches": n, "read_us": round(us, 2)}
                yield {**timed, **cost.counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    fake_h100.install()
    rows, read = [], profiled()
    for job, name in ARMS.items():
        wrappers = [Wrapper(path.read_text()) for path in sorted(options.folder.glob(f"{name}-*ward.py"))]
        rows += rows_of(job, wrappers, read[job])
        print(job, len(rows), flush=True)
    if options.json:
        what = "kernels generated on an H200: times read there, bytes and instructions counted without a GPU"
        versions = {"torch": torch.__version__, "triton": fake_h100.version("triton")}
        write_json(options.json, {"what": what, "device": "NVIDIA H200", "versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
