"""One step of a model, run for inspection: its recipe and its gradients; afterwards everything is as it was.

explain, calibrate, debug_step, check   compile the model afresh, with a backend of their own, and run one step
tune                                    does so for one recipe after the other, and runs many
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fp8compile.compiler import report_store
from fp8compile.compiler.inputs import cuda_devices, trains
from fp8compile.numerics.gradient_quality import BAR
from fp8compile.recipe.recipe import Recipe
from fp8compile.tools.compiled_module import running

LIMIT = 1024  # each of these compiles the same code once more; Dynamo's usual limit is 8
NOTHING_TO_DIFFERENTIATE = (
    "{}: nothing to differentiate: no output of the model depends on a parameter that trains. Give loss=, a function from "
    "the model's output to a scalar, or call model.requires_grad_()."
)


def check_is_module(model: object, caller: str) -> None:
    """Raises ValueError for a function, for example: a graph is matched to a model by the parameters of a module."""
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", type(model).__name__)
        raise ValueError(
            f"fp8compile.{caller} takes a module, not {name!r} ({type(model).__name__}). Of a compiled function, give the "
            f"module whose parameters it uses: fp8compile.{caller}(model, ...). If it uses none, put it into a module: "
            "class Step(torch.nn.Module) with the function's body as its forward"
        )


def check_needs_no_batch(model: nn.Module, caller: str) -> None:
    """Raises ValueError where the forward of ``model`` cannot be called without arguments."""
    try:
        inspect.signature(model.forward).bind()
    except TypeError as error:
        kind = type(model).__name__
        raise ValueError(f"{caller}({kind}, args=()): {kind}.forward is {error}: give a batch, args=(x,)") from None


def check_bar(bar: object, caller: str) -> None:
    """Raises ValueError unless ``bar`` is a number of dB from 0 to 100."""
    if isinstance(bar, bool) or not isinstance(bar, (int, float)) or not 0 <= bar <= 100:
        raise ValueError(
            f"{caller}: bar={bar!r} is no SQNR in dB to ask for; give a number from 0 to 100, such as {BAR:g}."
        )


def chosen_recipe(recipe: Recipe | str | Mapping[str, Any] | None, model: nn.Module) -> Recipe:
    """The recipe that the user names; else that of the running model; else the default."""
    if recipe is not None:
        return Recipe.resolve(recipe, Recipe())
    if (found := running(model)) is not None:
        return found.recipe
    ran = report_store.compiled_for(model)
    return ran[-1].recipe if ran else Recipe()


def one_step(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Callable[[Any], Tensor | None] | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the parameters that train, then of the arguments that train."""
    output = model(*args, **kwargs)
    scalar = loss(output) if loss else default_loss(output)
    if scalar is not None and not isinstance(scalar, Tensor):
        raise ValueError(f"loss must return a scalar tensor, not {scalar!r}: leave out .item() and float()")
    if scalar is None or not scalar.requires_grad:
        return ()  # nothing to differentiate: an inference graph
    if scalar.numel() != 1:
        raise ValueError(f"loss must return a scalar, not a tensor of shape {tuple(scalar.shape)}")
    inputs = [t for t in (*model.parameters(), *pytree.tree_leaves((args, kwargs))) if trains(t)]
    return torch.autograd.grad(scalar, inputs, allow_unused=True)


def default_loss(output: Any) -> Tensor | None:
    """``output.loss`` where there is one, else the sum of the outputs that can be differentiated."""
    if isinstance(found := getattr(output, "loss", None), Tensor):
        return found
    leaves = [t for t in pytree.tree_leaves(output) if trains(t)]
    return sum((t.float().sum() for t in leaves[1:]), leaves[0].float().sum()) if leaves else None


@contextlib.contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Buffers, random numbers and compiled forwards of ``model`` are afterwards as before; inside, nothing is compiled."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    for module, _ in compiled:
        module._compiled_call_impl = None
    others = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(cuda_devices(model.parameters())):
            yield
    finally:
        random.setstate(others[0])
        numpy.random.set_state(others[1])
        for module, call in compiled:
            module._compiled_call_impl = call
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def arguments(batch: Any, kwargs: Mapping[str, Any] | None, caller: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from a tensor, a sequence or a mapping; ``caller`` is named in errors."""
    if isinstance(batch, Mapping):
        if kwargs:
            raise ValueError(
                f"{caller}: batch is a mapping ({', '.join(map(str, batch))}) and so are kwargs "
                f"({', '.join(kwargs)}). To hand the model a mapping as it is, give batch=({{...}},)"
            )
        return (), dict(batch)
    return as_positional(batch), dict(kwargs or {})


def as_positional(args: Tensor | Sequence[Any]) -> tuple[Any, ...]:
    """Positional arguments; a tensor is one of them."""
    return (args,) if isinstance(args, Tensor) else tuple(args)


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value in the arguments with a name: ``argument 0['mask']``, or its keyword."""
    for argument, whole in (*((f"argument {i}", arg) for i, arg in enumerate(args)), *kwargs.items()):
        for path, value in pytree.tree_flatten_with_path(whole)[0]:
            yield argument + pytree.keystr(path), value
