"""Functions of tensors as graphs: each is traced once for values that are alike, not once per layer or compilation.

A traced graph holds no value of the compilation that made it. One of symbolic sizes is traced again by each compilation,
since symbols are a compilation's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fp8compile import _torch as private
from fp8compile.fx.tidying import tidy
from fp8compile.numerics.codec_calls import CodecCall, set_listener

CODEC_CALL = "fp8compile_codec_call"  # in the meta of the operations of one encode or decode: the call
LAYOUT = "fp8compile_layout"  # in the meta of a traced node: the layout of its result, if that has memory of its own
PLAIN = (type(None), bool, int, str, torch.dtype, torch.device)

MOST = 4096  # graphs that are kept

_traced: dict[Hashable, Graph] = {}
# By fake mode, which belongs to one compilation: graphs of its symbols, and its settings, which do not change.
_of_symbols: weakref.WeakKeyDictionary[Any, dict[Hashable, Graph]] = weakref.WeakKeyDictionary()
_settings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_known: dict[
    Hashable, tuple[int, Any]
] = {}  # settings by number; decompositions, kept so that no other has their identity


class _Unknown(Exception):
    """Something that may change what a function computes, and cannot be compared."""


Value = Tensor | torch.SymInt | int


def traced(fn: Callable[..., Any], values: Sequence[Value], fake_mode: Any) -> Graph:
    """``fn`` of ``values``, fake tensors of this mode and sizes, as a graph of core operations; ``result_of`` gives the value
    of a node's copy."""
    try:
        key = (_settings_key(fake_mode), _function_key(fn), _values_key(values))
    except _Unknown:
        return _trace(fn, values, fake_mode)
    static = all(isinstance(size, int) for value in values for size in _sizes(value))
    graphs = _traced if static else _of_symbols.setdefault(fake_mode, {})
    if key not in graphs:
        if len(graphs) >= MOST:
            graphs.clear()
        graphs[key] = _trace(fn, values, fake_mode)
    return graphs[key]


def _settings_key(fake_mode: Any) -> Hashable:
    """What a graph depends on beside its function and values: Inductor's decompositions, modes of PyTorch."""
    if fake_mode not in _settings:
        table = private.select_decomp_table()
        identities = tuple((id(op), id(fn)) for op, fn in table.items())
        config = private.inductor_config.save_config_portable()
        plain = frozenset((name, value) for name, value in config.items() if isinstance(value, (*PLAIN, float)))
        modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
        number, _ = _known.setdefault((identities, plain, modes), (len(_known), dict(table)))
        _settings[fake_mode] = number
    return (
        _settings[fake_mode],
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


def _trace(fn: Callable[..., Any], values: Sequence[Value], fake_mode: Any) -> Graph:
    with fake_mode, _calls_marked():
        graph: Graph = private.make_fx(fn, decomposition_table=private.select_decomp_table())(*values).graph
    tidy(graph)
    for node in graph.nodes:
        node.meta.pop("tensor_meta", None)
        layout = _fresh_layout(node, node.meta.pop("val", None))
        node.meta.update({LAYOUT: layout} if layout else {})
    return graph


@contextlib.contextmanager
def _calls_marked() -> Iterator[None]:
    before = set_listener(_mark)
    try:
        yield
    finally:
        set_listener(before)


def _mark(call: CodecCall, compute: Callable[[], Any]) -> Any:
    """Note on each operation that a call traces which call it belongs to."""
    with marked(CODEC_CALL, call):
        return compute()


@contextlib.contextmanager
def marked(key: str, value: object) -> Iterator[None]:
    """Operations that are traced inside have this in their meta, unless they have it already. Elsewhere nothing happens."""
    mode = private.get_proxy_mode()
    if mode is None:
        yield
        return
    nodes = mode.tracer.graph.nodes
    last = next(iter(reversed(nodes)), None)
    yield
    for node in itertools.takewhile(lambda each: each is not last, reversed(nodes)):
        node.meta.setdefault(key, value)


def _fresh_layout(node: Node, value: object) -> tuple[Any, ...] | None:
    """Shape, strides, dtype, device of a result with memory of its own; None where it may be a view or sizes are symbols."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or any(result.alias_info for result in schema.returns) or not private.is_plain_fake(value):
        return None
    assert isinstance(value, Tensor)
    sizes = (*value.shape, *value.stride())
    if value.requires_grad or value.storage_offset() or not all(isinstance(size, int) for size in sizes):
        return None
    return tuple(value.shape), value.stride(), value.dtype, value.device


def copy_into(graph: Graph, node: Node, copied: Mapping[Node, Node]) -> Node:
    """A copy of a traced node; a NaN among its arguments is a new one.

    Equal constants are merged before a joint graph is cut, and a NaN equals only itself. The same NaN object in all copies
    would become one value, made in the forward and saved for the backward.
    """
    new = graph.node_copy(node, lambda n: copied[n])
    if any(isinstance(a, float) and math.isnan(a) for a in new.args):
        new.args = tuple(float("nan") if isinstance(a, float) and math.isnan(a) else a for a in new.args)
    return new


def result_of(node: Node, fake_mode: Any) -> Any:
    """The value of a copy of a traced node, from those of its operands: a new tensor, or a view of its operand's value."""
    if (layout := node.meta.pop(LAYOUT, None)) is not None:
        return private.fake_empty(fake_mode, *layout)
    return fake_result(node)


def fake_result(node: Node) -> Any:
    """The value of a node from those of its operands, under their fake mode; a view shares its operand's memory."""
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _function_key(fn: object) -> Hashable:
    """Equal for functions of the same code with the same values closed over."""
    if not isinstance(fn, FunctionType):
        raise _Unknown
    cells = tuple(_value_key(cell.cell_contents) for cell in fn.__closure__ or ())
    return fn.__code__, cells, _value_key(fn.__defaults__), _value_key(fn.__kwdefaults__)


def _value_key(value: object) -> Hashable:
    """A value with its type, since 1, 1.0 and True have different effects on a tensor; so have 0.0 and -0.0."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value_key, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_value_key(getattr(value, each.name)) for each in dataclasses.fields(value))
    return _function_key(value)


def _values_key(values: Sequence[Value]) -> Hashable:
    """Shapes, strides, dtypes, devices, and which of the values are the same object: that becomes one input."""
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(value), place) for place, value in enumerate(values))
    return same, tuple(_tensor_key(value) if isinstance(value, Tensor) else _size_key(value) for value in values)


def _tensor_key(value: Tensor) -> Hashable:
    if not private.is_plain_fake(value) or value.layout is not torch.strided:
        raise _Unknown
    sizes = _sizes(value)
    return value.dtype, value.device, value.requires_grad, tuple(_size_key(size) for size in sizes)


def _sizes(value: Value) -> tuple[int | torch.SymInt, ...]:
    return (value,) if not isinstance(value, Tensor) else (*value.shape, *value.stride(), value.storage_offset())


def _size_key(size: int | torch.SymInt) -> Hashable:
    return size if isinstance(size, int) else ("symbol", size.node.expr)


def stored(x: Tensor) -> Tensor:
    """``x`` itself, as a view that makes Inductor store it once for all its readers.

    Inductor realizes the operands of mm, not those of _scaled_mm (torch 2.13, needs_realized_inputs): each matmul would
    store a copy of its own.
    """
    return x.as_strided(x.size(), x.stride())
