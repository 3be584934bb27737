"""Lower a function, a model or a post-AOT graph to Triton for sm_90: what is generated, launched and moved.

Dynamo and AOTAutograd trace on the CPU; ``lower_backend`` then puts each graph onto fake cuda tensors and
gives it to Inductor. Passes that run before that (joint-graph hooks, the partitioner) therefore see device
"cpu", unless the joint graph is put onto cuda too (on_cuda.py).

Nothing is computed unless ``execute``: a lowered graph answers with uninitialised tensors of the right
shapes, so realistic sizes cost nothing. With ``execute``, in a process started with ``TRITON_INTERPRET=1``,
the generated wrapper runs on CPU buffers and its kernels run in Triton's interpreter.
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp8compile.compiler.generated_memory import sizes_of
from fp8compile.fx.graph import is_on_host, size_hint

from . import fake_h100, interpreter
from .kernel import Kernel, tensor_bytes

InnerCompile = Callable[..., Any]
Rewrite = Callable[[str, str], str]  # (kernel name, source) -> source
Backend = Callable[[GraphModule, Sequence[Any], InnerCompile], Any]

CUDA = torch.device("cuda", 0)
_EXTERN = re.compile(r"^\s*(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(", re.MULTILINE)
_KERNEL_SOURCE = re.compile(r"'''.*?'''", re.DOTALL)
_LAUNCH = re.compile(r"^\s*(\w+)\.run\(", re.MULTILINE)
_WORKSPACE = re.compile(
    r"^\s*workspace_\d+ = empty_strided_cuda\(\((\d+), ?\), \(1, ?\), torch\.(\w+)\)", re.MULTILINE
)


@dataclass
class LoweredGraph:
    """What Inductor made of one graph; ``graph`` is what Inductor was given, after its post-grad passes."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    wrapper: str = ""
    graph: torch.fx.Graph | None = None
    sizes: dict[str, int] = field(default_factory=dict)  # bytes, by the wrapper's names of inputs and buffers

    @property
    def launches(self) -> list[str]:
        """The generated kernels in the order they are launched; a kernel may be launched more than once."""
        calls = _KERNEL_SOURCE.sub("", self.wrapper)  # a kernel's source holds a launch too, to benchmark it
        return [name for name in _LAUNCH.findall(calls) if name in self.kernels]

    def arguments(self, kernel: str) -> list[str]:
        """What the wrapper's first launch of a kernel takes, by its names."""
        found = re.search(rf"^\s*{kernel}\.run\((.*), stream=", _KERNEL_SOURCE.sub("", self.wrapper), re.MULTILINE)
        assert found, kernel
        return found.group(1).split(", ")

    @property
    def externs(self) -> list[str]:
        """Calls that are not generated, e.g. ``extern_kernels.mm``."""
        return _EXTERN.findall(self.wrapper)

    @property
    def num_bytes(self) -> int:
        """Bytes moved by all launches of generated kernels; externs and workspaces not counted."""
        return sum(self.kernels[name].num_bytes for name in self.launches)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the partial sums that kernels which sum along rows and across them leave in workspaces: written by the
        kernel, and read by the sum of them, which no kernel's source names."""
        return 2 * sum(tensor_bytes(numel, "1", dtype) for numel, dtype in _WORKSPACE.findall(self.wrapper))

    @property
    def partial_sums(self) -> int:
        """How many such sums are added up outside of kernels."""
        return self.wrapper.count(".sum(dim=0)")

    @property
    def estimated_bytes(self) -> int:
        return sum(self.kernels[name].estimated_bytes for name in self.launches)


@dataclass
class Lowered:
    """The graphs in the order they were compiled: for a training step, forward then backward."""

    graphs: list[LoweredGraph] = field(default_factory=list)
    outputs: Any = None
    rewrite: Rewrite | None = None
    compiled: Callable[..., Any] | None = None

    @property
    def kernels(self) -> dict[str, Kernel]:
        return {name: kernel for graph in self.graphs for name, kernel in graph.kernels.items()}

    @property
    def only(self) -> LoweredGraph:
        (graph,) = self.graphs
        return graph

    def rerun(self, *args: Any, rewrite: Rewrite | None = None) -> Any:
        """Execute an inference graph again, as compiled, every kernel's source passed through ``rewrite``."""
        assert self.compiled, "lower with execute=True"
        self.rewrite = rewrite
        with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            return self.compiled(*args)


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
) -> Lowered:
    """Lower ``fn(*args)``, a function or a module, and with ``backward`` its backward too.

    Args:
        fn: what a user would hand to ``torch.compile``.
        args: real CPU tensors (``torch.empty`` will do unless ``execute``).
        backward: also call backward, with ones, from every output that requires grad.
        backend: calls ``compile_fx`` with the ``inner_compile`` it is given: the place for one under test.
        config_patches: Inductor settings, passes among them, on top of ``lowering_config``'s.
        execute: run what was generated through the interpreter; the results are in ``outputs``.
    """
    lowered = Lowered()
    inner_compile = lower_backend(lowered, execute=execute)
    torch._dynamo.reset()
    with lowering_config(config_patches), torch.set_grad_enabled(backward):
        compiled = torch.compile(fn, backend=lambda gm, inputs: backend(gm, inputs, inner_compile), fullgraph=True)
        lowered.compiled, lowered.outputs = compiled, compiled(*args)
        if backward:
            _backward(lowered.outputs)
    return lowered


def _backward(outputs: Any) -> None:
    tensors = [out for out in torch.utils._pytree.tree_leaves(outputs) if isinstance(out, Tensor)]
    differentiable = [out for out in tensors if out.requires_grad]
    torch.autograd.backward(differentiable, [torch.ones_like(out) for out in differentiable])


@contextmanager
def lowering_config(config_patches: dict[str, Any] | None = None) -> Iterator[None]:
    """Inductor's defaults, but: kernels carry their byte counts, no caches, no compile workers."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    settings = {"benchmark_kernel": True, "fx_graph_cache": False, "compile_threads": 1}
    settings |= config_patches or {}
    with inductor_config.patch(settings), functorch_config.patch(enable_autograd_cache=False):
        yield


def lower_backend(lowered: Lowered, *, execute: bool = False) -> InnerCompile:
    """An ``inner_compile`` for ``compile_fx`` that appends each post-AOT graph, lowered, to ``lowered``."""

    def inner_compile(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        graph = LoweredGraph()
        lowered.graphs.append(graph)
        on_cuda, cuda_inputs = retarget(gm, example_inputs)
        graph.graph = on_cuda.graph
        with recording(graph, _executed(lowered), _poisoned) if execute else recording(graph, _not_executed):
            compiled = compile_fx_inner(on_cuda, cuda_inputs, **kwargs)
        return compiled if execute else uncomputed(on_cuda)

    return inner_compile


def retarget(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """A copy of a functional graph, and its inputs, with every tensor on a fake cuda device."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    gm = copy.deepcopy(gm)
    view_to_reshape(gm)  # as Inductor does: it may have laid out what the forward saved as no view can be taken of
    return gm, retarget_in_place(gm, example_inputs)


def retarget_in_place(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """``retarget`` without the copy; returns the inputs."""
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = _fake_mode_of(example_inputs)
    for node in gm.graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), _on_cuda)
    gm.recompile()
    with mode, torch.no_grad():
        takes = gm.graph.find_nodes(op="placeholder")
        inputs = [x if is_on_host(node) else _twin(x, CUDA) for node, x in zip(takes, example_inputs, strict=True)]
    with mode:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    return inputs


def _fake_mode_of(values: Sequence[Any]) -> Any:
    from torch._guards import TracingContext, detect_fake_mode

    mode = detect_fake_mode(values)
    if mode is None:
        context = TracingContext.try_get()
        assert context and context.fake_mode, "compile_fx traces under a fake mode"
        mode = context.fake_mode
    return mode


def _on_cuda(argument: Any) -> Any:
    return CUDA if isinstance(argument, torch.device) else argument


def uncomputed(gm: GraphModule) -> Callable[[list[Any]], list[Any]]:
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
    sizes, strides = (
        [size_hint(n) for n in each] for each in (value.size(), value.stride())
    )  # a random state's is a symbol
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="cpu")


def _twin(x: Any, device: torch.device) -> Any:
    """An uninitialised tensor like ``x`` in all but its device; what is no tensor is its own twin."""
    if not isinstance(x, Tensor):
        return x
    twin = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)
    return twin.as_strided(x.size(), x.stride(), x.storage_offset()) if x.storage_offset() else twin


def _poisoned(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    """What a kernel does not write must not look right because it was, the last time: NaN in every float format."""
    buffer = torch.empty_strided(size, stride, dtype=dtype)
    buffer.untyped_storage().fill_(255)
    return buffer


def _unwritten(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


@contextmanager
def recording(
    graph: LoweredGraph, launcher: Callable[[Kernel], Any], empty_strided_cuda: Any = _unwritten
) -> Iterator[None]:
    """Catch kernels and wrapper of the graph compiled inside; the wrapper runs what ``launcher`` returns, on buffers that
    ``empty_strided_cuda`` makes."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def triton(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        graph.kernels[name] = kernel = Kernel(name, source)
        return launcher(kernel)

    def save_output_code(code: str) -> None:
        graph.wrapper = code
        with suppress(ValueError):  # of sizes that are left open
            graph.sizes = sizes_of(V.graph)

    with ExitStack() as patches:
        for owner, name, value in (
            (AsyncCompile, "triton", triton),
            (GraphLowering, "save_output_code", staticmethod(save_output_code)),
            (torch._C._dynamo.guards, "_empty_strided_cuda", empty_strided_cuda),
        ):
            fake_h100.require(owner, name)
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _not_executed(kernel: Kernel) -> Any:
    return SimpleNamespace(run=None)


def _executed(lowered: Lowered) -> Callable[[Kernel], Any]:
    """Kernels that run in the interpreter, as ``lowered.rewrite`` has them at that moment."""
    assert interpreter.interpreting(), "execute needs TRITON_INTERPRET=1"

    def launcher(kernel: Kernel) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            source = lowered.rewrite(kernel.name, kernel.source) if lowered.rewrite else kernel.source
            _largest_block_only(load_kernel(kernel.name, source)).run(*args, **kwargs)

        return SimpleNamespace(run=run)

    return launcher


def _largest_block_only(autotuner: Any) -> Any:
    """The interpreter takes the first configuration; its cost is the number of programs, not their size."""
    autotuner.configs.sort(
        key=lambda config: math.prod(v for k, v in config.kwargs.items() if k.endswith("BLOCK")), reverse=True
    )
    return autotuner


@functools.cache
def _source_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="sm90_kernels_"))


def load_kernel(name: str, source: str) -> Any:
    """Import generated source: the ``CachingAutotuner`` that holds the kernel and its configurations."""
    stem = f"{name[:80]}_{hashlib.sha1(source.encode()).hexdigest()[:8]}"
    path = _source_folder() / f"{stem}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
