"""State formats for single parameters and modules, instead of the optimizer's default (Dettmers et al. 2021).

    override(model.lm_head, state_format="fp32")                       every parameter in it, as they are now
    override(model.embed, state_format="fp32", names=("weight",))      one of them
    override(parameter, state_format=("bf16", "fp32"))                 first and second moments apart

A mark on a module is kept by the module. It goes along with the module's copies and pickles, and holds for the parameter that
has that name when an optimizer asks (fully_shard, to_empty and others put new ones in). A mark on a parameter holds for that
object alone. The last call wins. Nothing here keeps a parameter or a module alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8compile.optim.formats import StateFormat, state_format_pair

_KEY = "_state_formats"  # in the __dict__ of a marked module: neither a parameter nor in its state_dict


class _Marks:
    """The formats of parameters that one module owns, by name. Copied or pickled with its module, it belongs to the copy."""

    def __init__(self, owner: nn.Module | None, formats: dict[str, StateFormat]) -> None:
        self.owner: Callable[[], nn.Module | None] = weakref.ref(owner) if owner is not None else lambda: None
        self.formats = formats
        _marked.add(self)

    def __reduce__(self) -> tuple[object, ...]:
        # As state, not as arguments: the owner is being copied while its marks are.
        return object.__new__, (_Marks,), (self.owner(), dict(self.formats))

    def __setstate__(self, state: tuple[nn.Module | None, dict[str, StateFormat]]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def of(self, parameter: Tensor) -> set[StateFormat]:
        """The formats under the names that ``parameter`` has now."""
        owner = self.owner()
        parameters = owner._parameters if owner is not None else {}
        return {fmt for name, fmt in self.formats.items() if parameters.get(name) is parameter}


_marked: weakref.WeakSet[_Marks] = weakref.WeakSet()
_by_parameter = WeakTensorKeyDictionary()


def override(
    target: nn.Module | Tensor,
    *,
    state_format: StateFormat,
    names: Iterable[str] | None = None,
    check: Callable[[StateFormat], object] | None = None,
) -> None:
    """Make every optimizer of fp8compile keep the states of ``target`` in ``state_format``, even if it would not encode them.

    Args:
        target: a parameter, or a module: all parameters that it and its submodules have now, not those added later.
        state_format: as the optimizers take it: a format, or a pair for first moments and for second.
        names: only these parameters of the module, named as in ``module.named_parameters()``.
        check: raises ValueError for a format that does not exist; None: the optimizers' own check.

    Raises:
        ValueError: no such format, no such parameter, or nothing to mark.
    """
    fmt = _checked(state_format, check)
    if isinstance(target, nn.Module):
        mark(target, _names_in(target, names), fmt)
        return
    if not isinstance(target, Tensor):
        kind = type(target).__name__
        raise ValueError(f"override takes a module or a parameter, not a {kind}: pass model.lm_head, say")
    if names is not None:
        raise ValueError(f"override: names={names!r} are for a module, and this is a parameter: leave them out")
    _by_parameter[target] = fmt


def mark(module: nn.Module, names: Iterable[str], fmt: StateFormat) -> None:
    """``override`` of parameters of a module, unchecked: marks each on the module that owns it, and wherever it is tied."""
    for name in names:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        parameter = owner._parameters[last]
        _marks_of(owner).formats[last] = fmt
        if parameter is not None:
            if parameter in _by_parameter:
                del _by_parameter[parameter]
            _correct_ties(parameter, fmt)


def overridden(parameter: Tensor) -> StateFormat | None:
    """The format that was requested for this parameter or for its module; None if none was.

    Raises:
        ValueError: modules that share the parameter were marked differently before they came to share it.
    """
    if parameter in _by_parameter:
        return _by_parameter[parameter]  # type: ignore[no-any-return]
    found = set().union(*(marks.of(parameter) for marks in _marked))
    if len(found) > 1:
        raise ValueError(
            f"a shared parameter of shape {tuple(parameter.shape)} has several state formats, one from each module: "
            f"{', '.join(sorted(map(repr, found)))}. Say which after tying it: override(parameter, state_format=...)"
        )
    return found.pop() if found else None


def override_in(model: nn.Module) -> dict[str, StateFormat]:
    """The overrides in ``model``, by parameter name; a shared parameter is listed under each of its names."""
    found = {name: overridden(p) for name, p in model.named_parameters(remove_duplicate=False)}
    return {name: fmt for name, fmt in found.items() if fmt is not None}


def _marks_of(owner: nn.Module) -> _Marks:
    """The marks of this module object: a shallow copy starts with those of its original."""
    marks = vars(owner).get(_KEY)
    if marks is None or marks.owner() is not owner:
        marks = _Marks(owner, dict(marks.formats) if marks else {})
        setattr(owner, _KEY, marks)
    return marks


def _correct_ties(parameter: Tensor, fmt: StateFormat) -> None:
    for marks in list(_marked):
        if marks.of(parameter):
            owned = marks.owner()._parameters  # type: ignore[union-attr]  # alive, or it would own nothing
            marks.formats |= {name: fmt for name in marks.formats if owned.get(name) is parameter}


def _names_in(module: nn.Module, names: Iterable[str] | None) -> list[str]:
    there = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    wanted = there if names is None else [names] if isinstance(names, str) else list(names)
    kind = type(module).__name__
    if not wanted:
        raise ValueError(f"override: this {kind} has no parameters: mark the module that does, after it is built")
    for name in wanted:
        if name not in there:
            raise ValueError(f"override: this {kind} has no parameter {name!r}; it has {', '.join(there) or 'none'}")
    return wanted


def _checked(state_format: StateFormat, check: Callable[[StateFormat], object] | None) -> StateFormat:
    if check is None:
        check = state_format_pair
    check(state_format)
    if isinstance(state_format, str):
        return state_format
    if len(state_format) != 2:
        raise ValueError(f"state_format {state_format!r}: pass one format, or two: for first moments and for second")
    return state_format[0], state_format[1]
