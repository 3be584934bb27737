"""Vectors of generated C++: of 256 bits where this machine's compiler is wrong in those of AVX-512. Changes no numbers.

gcc 12.2 at -O3 joins scalars into vectors (``-ftree-slp-vectorize``). For AVX-512 it then stores wrong values, and nothing
fails: where BF16 values are stored transposed beside sums of their rows, behind a clamp and a choice between two values.
Plain PyTorch programs meet it too. So one such function is compiled and compared with eager, once a process, where a CPU
has AVX-512. A compiler that was seen to be wrong is not tried again.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.store_check import LOOPED, differing, stored_twice_in_a_loop, values_to_store
from fp8compile.compiler.watchers import watch_passes

SIMDLEN = "cpp.simdlen"
SHORT = {SIMDLEN: 256}
SEEN_TO_BE_WRONG = "gcc version 12.2."  # in what the compiler says of itself
WARNING = (
    "generated C++ uses vectors of 256 bits: in those of AVX-512 this machine's C++ compiler stores wrong values (seen with "
    "gcc 12.2 at -O3), for torch.compile without fp8compile too. Cure: name another compiler by CXX. "
    "debug.inductor={'cpp.simdlen': 512} takes long vectors all the same"
)


def vectors_of(inputs: Iterable[object], options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options for a graph with these inputs, none where none are needed; warns once where some are."""
    if options.get(SIMDLEN, private.inductor_config.cpp.simdlen) is not None or not _on_a_cpu(inputs):
        return {}
    has_long_ones = torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not has_long_ones or (not is_seen_to_be_wrong() and long_vectors_are_right()):
        return {}
    report_store.warn_once(WARNING)
    return dict(SHORT)


@functools.cache
def is_seen_to_be_wrong() -> bool:
    """Whether the C++ compiler that Inductor calls is one that was seen to be wrong."""
    named = private.inductor_config.cpp.cxx
    command = [named if isinstance(named, str) else named[-1], "-v"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # Inductor looks further for one, and says what it misses
        return False
    return SEEN_TO_BE_WRONG in said.stderr + said.stdout


@functools.cache
def long_vectors_are_right() -> bool:
    """Whether generated code with vectors as long as this machine has stores the codes and statistics that eager stores."""
    x = values_to_store(torch.device("cpu"), LOOPED)
    # Inductor's cache asks for a shape environment; that of AOTAutograd counts the graph that is compiled now alone.
    mode = private.FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(x, static_shapes=True)
    uncounted = private.functorch_config.patch(enable_autograd_cache=False)
    with private.tracing(private.TracingContext(mode)), watch_passes(None), torch.no_grad(), uncounted:
        graph = private.make_fx(stored_twice_in_a_loop)(x)
        compiled: Any = private.compile_fx(graph, [fake])
        return not differing(compiled(x), stored_twice_in_a_loop(x))


def _on_a_cpu(inputs: Iterable[object]) -> bool:
    return {value.device.type for value in inputs if isinstance(value, Tensor)} == {"cpu"}
