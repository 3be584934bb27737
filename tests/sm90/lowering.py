"""Lower a function, a model or a post-AOT graph to Triton for sm_90: what is generated, launched and moved.

Dynamo and AOTAutograd trace on the CPU; ``lower_backend`` then puts each graph onto fake cuda tensors and gives it to
Inductor. Passes that run before that (Inductor's joint-graph hooks, the partitioner) therefore see device "cpu".

Nothing is computed unless ``execute``: a lowered graph answers with uninitialised tensors of the right shapes, so
realistic sizes cost nothing. With ``execute``, in a process started with ``TRITON_INTERPRET=1``, the generated
wrapper runs on CPU buffers and its kernels run in Triton's interpreter.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from . import fake_h100, interpreter

InnerCompile = Callable[..., Any]
Rewrite = Callable[[str, str], str]
Backend = Callable[[GraphModule, Sequence[Any], InnerCompile], Any]

CUDA = torch.device("cuda", 0)
_EXTERN = re.compile(r"^\s*(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(", re.MULTILINE)
_LAUNCH = re.compile(r"^\s*(\w+)\.run\(", re.MULTILINE)
_NUM_GB = re.compile(r"'kernel_num_gb': ([\d.e+-]+)")


@dataclass(frozen=True)
class Kernel:
    """One generated Triton kernel."""

    name: str
    source: str

    @property
    def num_bytes(self) -> int:
        """What one launch reads and writes, by Inductor's estimate: each buffer once, one updated in place twice."""
        match = _NUM_GB.search(self.source)
        assert match, f"{self.name} carries no kernel_num_gb: lower under `lowering_config`"
        return round(float(match.group(1)) * 1e9)


@dataclass
class LoweredGraph:
    """What Inductor made of one graph."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    wrapper: str = ""

    @property
    def launches(self) -> list[str]:
        """The generated kernels in the order they are launched; a kernel may be launched more than once."""
        return [name for name in _LAUNCH.findall(self.wrapper) if name in self.kernels]

    @property
    def externs(self) -> list[str]:
        """Calls that are not generated, e.g. ``extern_kernels.mm``."""
        return _EXTERN.findall(self.wrapper)

    @property
    def num_bytes(self) -> int:
        """Bytes moved by all launches of generated kernels; externs not counted."""
        return sum(self.kernels[name].num_bytes for name in self.launches)


@dataclass
class Lowered:
    """The graphs in the order they were compiled: for a training step, forward then backward."""

    graphs: list[LoweredGraph] = field(default_factory=list)
    outputs: Any = None

    @property
    def kernels(self) -> dict[str, Kernel]:
        return {name: kernel for graph in self.graphs for name, kernel in graph.kernels.items()}

    @property
    def only(self) -> LoweredGraph:
        (graph,) = self.graphs
        return graph


def stock_backend(gm: GraphModule, example_inputs: Sequence[Any], inner_compile: InnerCompile) -> Any:
    """Plain Inductor."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, example_inputs, inner_compile=inner_compile)


def lower(
    fn: Callable[..., Any],
    *args: Any,
    backward: bool = False,
    backend: Backend = stock_backend,
    config_patches: dict[str, Any] | None = None,
    execute: bool = False,
    rewrite: Rewrite | None = None,
) -> Lowered:
    """Lower ``fn(*args)``, a function or a module, and with ``backward`` its backward too.

    Args:
        fn: what a user would hand to ``torch.compile``.
        args: real CPU tensors (``torch.empty`` will do unless ``execute``).
        backward: also call backward, with ones, from every output that requires grad.
        backend: calls ``compile_fx`` with the ``inner_compile`` it is given; the place for a backend under test.
        config_patches: Inductor settings, passes among them, on top of ``lowering_config``'s.
        execute: run what was generated through the interpreter; the results are in ``outputs``.
        rewrite: ``(kernel name, source) -> source``, to break a kernel on purpose.
    """
    lowered = Lowered()
    inner_compile = lower_backend(lowered, execute=execute, rewrite=rewrite)
    torch._dynamo.reset()
    with lowering_config(config_patches), torch.set_grad_enabled(backward):
        compiled = torch.compile(fn, backend=lambda gm, inputs: backend(gm, inputs, inner_compile), fullgraph=True)
        lowered.outputs = compiled(*args)
        if backward:
            _backward(lowered.outputs)
    return lowered


def _backward(outputs: Any) -> None:
    leaves = [out for out in torch.utils._pytree.tree_leaves(outputs) if isinstance(out, Tensor) and out.requires_grad]
    torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])


@contextmanager
def lowering_config(config_patches: dict[str, Any] | None = None) -> Iterator[None]:
    """Inductor's defaults, but: kernels carry their byte counts, no caches, no compile workers."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    settings = {"benchmark_kernel": True, "fx_graph_cache": False, "compile_threads": 1, **(config_patches or {})}
    with inductor_config.patch(settings), functorch_config.patch(enable_autograd_cache=False):
        yield


def lower_backend(lowered: Lowered, *, execute: bool = False, rewrite: Rewrite | None = None) -> InnerCompile:
    """An ``inner_compile`` for ``compile_fx`` that lowers each post-AOT graph for sm_90 and appends it to ``lowered``."""

    def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        graph = LoweredGraph()
        lowered.graphs.append(graph)
        on_cuda, cuda_inputs = retarget(gm, example_inputs)
        with _recording(graph, execute=execute, rewrite=rewrite):
            compiled = compile_fx_inner(on_cuda, cuda_inputs, **kwargs)
        return compiled if execute else _unexecuted(on_cuda)

    return inner_compile


def retarget(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """A copy of a functional graph with every tensor, ``meta`` included, on a fake cuda device; and its inputs."""
    from torch._guards import TracingContext, detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = detect_fake_mode(example_inputs)
    if mode is None:
        context = TracingContext.try_get()
        assert context and context.fake_mode, "compile_fx traces under a fake mode"
        mode = context.fake_mode
    gm = copy.deepcopy(gm)
    for node in gm.graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), _on_cuda)
    gm.recompile()
    with mode, torch.no_grad():
        inputs = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=CUDA) if isinstance(t, Tensor) else t
            for t in example_inputs
        ]
    with mode:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return gm, inputs


def _on_cuda(argument: Any) -> Any:
    return CUDA if isinstance(argument, torch.device) else argument


def _unexecuted(gm: GraphModule) -> Callable[[list[Any]], list[Any]]:
    """A compiled graph that computes nothing: uninitialised CPU tensors where ``gm`` returns tensors."""

    def outputs(args: list[Any]) -> list[Any]:
        args.clear()
        return [_uninitialised(node) for node in gm.graph.output_node().args[0]]  # type: ignore[union-attr]

    outputs._boxed_call = True  # type: ignore[attr-defined]
    return outputs


def _uninitialised(node: Any) -> Any:
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, Tensor):
        return value
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype)


@contextmanager
def _recording(graph: LoweredGraph, *, execute: bool, rewrite: Rewrite | None) -> Iterator[None]:
    """Catch the kernels and the wrapper of the graph that Inductor compiles inside."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        source = rewrite(name, source) if rewrite else source
        graph.kernels[name] = Kernel(name, source)
        return _largest_block_only(load_kernel(name, source)) if execute else SimpleNamespace(run=None)

    def save_output_code(code: str) -> None:
        graph.wrapper = code

    def empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    with ExitStack() as patches:
        for owner, name, value in (
            (AsyncCompile, "triton", triton),
            (GraphLowering, "save_output_code", staticmethod(save_output_code)),
            (torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided_cuda),
        ):
            if not hasattr(owner, name):
                fake_h100.replace(owner, name, value)  # raises HarnessOutdated
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _largest_block_only(autotuner: Any) -> Any:
    """The interpreter takes the first configuration, and its cost is the number of programs, not their size."""
    assert interpreter.interpreting(), "execute needs TRITON_INTERPRET=1"
    autotuner.configs.sort(
        key=lambda config: math.prod(v for k, v in config.kwargs.items() if k.endswith("BLOCK")), reverse=True
    )
    return autotuner


@functools.cache
def _source_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sm90_kernels_"))


def load_kernel(name: str, source: str) -> Any:
    """Import generated source; returns the ``CachingAutotuner`` that holds the kernel and its configurations."""
    stem = f"{name[:80]}_{hashlib.sha1(source.encode()).hexdigest()[:8]}"
    path = _source_folder() / f"{stem}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
