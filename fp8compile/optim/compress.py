"""A plain torch.optim optimizer with encoded states: its own compiled step decodes and encodes them.

    optimizer = fp8compile.compress(torch.optim.AdamW(model.parameters(), lr=torch.tensor(3e-4)), model=model)
    step = torch.compile(optimizer.step, backend="fp8compile")

    optimizer.state[p] = {"step": Tensor, "exp_avg": EncodedTensor, "exp_avg_sq": EncodedTensor}

The compiled step equals fp8compile.optim's of the same name bit for bit. Without torch.compile, or with a backend that is
not ours, the step still works but rounds a state after every operation on it. A learning rate that changes must be a
tensor, as with torch.optim: a float is a constant of the compiled code. And it must not be 0: torch.optim's compiled Adam
then divides 0 by 0 where a gradient has always been 0, so a warm-up has to begin above 0 (fp8compile.optim's need not).

All parameters are one graph, so compiling takes longer than with fp8compile.optim, which compiles once for all; and rows that
end in a short group (length no multiple of 128) are put together from two pieces, which moves about 4 times the bytes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fp8compile._distributed import is_sharded, shard_like
from fp8compile.optim import checking, checkpoint
from fp8compile.optim.base import EncodedOptimizer
from fp8compile.optim.encoded_tensor import EncodedTensor
from fp8compile.optim.formats import StateFormat, state_format_pair
from fp8compile.optim.overrides import overridden
from fp8compile.optim.placement import DEFAULT_FORMAT, Names, choose_placement
from fp8compile.optim.plan import Plan
from fp8compile.optim.updates import AdamUpdate, SGDUpdate, Update

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Group = Mapping[str, Any]
State = dict[str, Any]

Known = list[tuple[Tensor, str | None, bool, StateFormat | None]]  # name, whether an embedding's weight, override

REDUCE = "__reduce_ex__"  # of the instance: the class is torch's
KINDS = (AdamW, Adam, SGD)
FIXED = {"foreach": False, "fused": False}  # one formula on every device; the compiled step makes both unnecessary


def compress(
    optimizer: AnyOptimizer,
    state_format: StateFormat = DEFAULT_FORMAT,
    *,
    model: nn.Module | None = None,
    overrides: Mapping[str, StateFormat] | None = None,
) -> AnyOptimizer:
    """Encode the states of a ``torch.optim.AdamW``, ``Adam`` or ``SGD``, those it has and those it will have.

    Which ones is decided as in fp8compile.optim: small tensors, embeddings and what is overridden keep FP32. State dicts
    are interchangeable with fp8compile.optim's and load torch.optim's. Copies and pickles are compressed too. Call it again
    after ``add_param_group``.

    Args:
        optimizer: is changed, and returned.
        state_format: of the states; a pair gives the first moments' and the second moments'. A parameter group that has
            an entry ``state_format`` of its own follows that.
        model: whose embeddings, overrides and names of parameters are to be known. Names also come from an optimizer
            made with ``model.named_parameters()``.
        overrides: formats by patterns (fnmatch) on parameter names.

    Raises:
        ValueError: an optimizer, option, format or parameter that this does not work for; then nothing was changed.
    """
    _check_kind(optimizer)
    rules = Rules.of(optimizer, state_format, model, overrides or {})
    for group in optimizer.param_groups:
        rules.check(group, optimizer.state)
    new = rules.encodings(optimizer)
    decompress(optimizer)
    for group in optimizer.param_groups:
        group.update(FIXED)
    optimizer.state.update(new)
    _follow(optimizer, rules)
    return optimizer


def decompress(optimizer: AnyOptimizer) -> AnyOptimizer:
    """The optimizer with plain FP32 states again; one that is not compressed is left as it is."""
    _, hooks = RULES.pop(optimizer, (None, ()))
    optimizer.__dict__.pop(REDUCE, None)
    for hook in hooks:
        hook.remove()
    for p, state in optimizer.state.items():
        optimizer.state[p] = {k: v.decode() if isinstance(v, EncodedTensor) else v for k, v in state.items()}
    return optimizer


def _check_kind(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if isinstance(optimizer, EncodedOptimizer):
        raise ValueError(f"the states of fp8compile.optim.{name} are encoded already: use it as it is")
    if type(optimizer) not in KINDS:
        raise ValueError(
            f"compress takes torch.optim.AdamW, Adam and SGD themselves, not {type(optimizer).__module__}.{name}, whose "
            "step it does not know. Use one of these, or one of fp8compile.optim: AdamW, Adam, SGD, Lion, LAMB, RMSprop, Muon"
        )


@dataclass(frozen=True)
class Rules:
    """How the states of one optimizer are stored. Stands in for EncodedOptimizer in fp8compile.optim.checkpoint."""

    state_format: StateFormat
    names: Names
    patterns: Mapping[str, StateFormat]

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        state_format: StateFormat,
        model: nn.Module | None,
        patterns: Mapping[str, StateFormat],
    ) -> Rules:
        state_format_pair(state_format)
        checking.check_formats(patterns)
        if not isinstance(model, (nn.Module, NoneType)):
            raise ValueError(f"model={model!r}: the module whose parameters these are is needed, or None")
        known = Names.of(model) if model is not None else Names()
        named = dict(known.names)
        for group in optimizer.param_groups:
            named.update(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
        checking.check_overrides(patterns, [*named.values()])
        return cls(state_format, Names(named, known.embeddings, known.overridden), dict(patterns))

    def format_of(self, group: Group) -> StateFormat:
        return cast(StateFormat, group.get("state_format", self.state_format))

    def plan_of(self, p: Tensor, group: Group) -> Plan:
        """The states of ``p`` and their codecs; the rest of a plan is up to torch.optim here."""
        placed = choose_placement(p, self.format_of(group), self.names, self.patterns)
        update: Update = (
            AdamUpdate(True, group["amsgrad"]) if "betas" in group else SGDUpdate(bool(group["momentum"]))
        )
        codecs = tuple((state, placed.codec(signed)) for state, signed in update.states.items())
        return Plan(update, codecs, (), p.dtype)

    def known_of(self, optimizer: Optimizer) -> Known:
        """What is known of each parameter by its ``id``, which a copy of it does not share."""
        of = self.names
        return [
            (p, of.names.get(id(p)), id(p) in of.embeddings, overridden(p) or of.overridden.get(id(p)))
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    def encodings(self, optimizer: Optimizer) -> dict[Tensor, State]:
        """The states of all parameters as the stock step takes them."""
        return {
            p: self.encoded(p, group, optimizer.state.get(p, {}), i)
            for group in optimizer.param_groups
            for i, p in enumerate(group["params"])
        }

    def check(self, group: Group, states: Mapping[Tensor, State]) -> None:
        """Raises ValueError for options and states that cannot be compressed."""
        if group.get("amsgrad") and set(state_format_pair(self.format_of(group))) != {"fp32"}:
            raise ValueError("amsgrad: a running maximum, encoded anew at every step, only grows. Leave amsgrad out")
        for option in ("differentiable", "fused"):
            if group.get(option):
                raise ValueError(
                    f"{option}=True: its step cannot be compiled. Make the optimizer with {option}=False"
                )
        for i, p in enumerate(group["params"]):
            where = EncodedOptimizer._in_group(group, i)
            if p.dtype != torch.float32 or is_sharded(p):
                kind = "sharded" if is_sharded(p) else str(p.dtype).removeprefix("torch.")
                raise ValueError(
                    f"{where} is {kind}: compress takes whole float32 ones. Use fp8compile.optim for others"
                )
            if group.get("momentum") and group["dampening"] and "momentum_buffer" not in states.get(p, {}):
                raise ValueError(
                    f"{where} has no momentum yet, and the first step with dampening is unlike the others: call compress "
                    "after a first step, or use fp8compile.optim.SGD"
                )

    def encoded(self, p: Tensor, group: Group, state: State, key: object) -> State:
        """A state as torch.optim or fp8compile.optim keeps it, or an empty one, in the form that the stock step takes."""
        plan = self.plan_of(p, group)
        made = checkpoint._converted(cast(Any, self), p, cast(Any, group), _plain(state), key)
        if not made:
            made = {name: shard_like(p, part) for name, part in plan.initial(p.detach()).items()}
            made["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        new: State = {"step": made["step"]} if "betas" in group else {}
        for (name, codec), signed in zip(plan.codecs, plan.update.states.values(), strict=True):
            parts = [made[key] for key in plan.part_keys(name)]
            new[name] = parts[0] if codec.name == "fp32" else EncodedTensor(parts, p.shape, codec.name, signed)
        return new


RULES: weakref.WeakKeyDictionary[Optimizer, tuple[Rules, tuple[Any, ...]]] = weakref.WeakKeyDictionary()


def _follow(optimizer: Optimizer, rules: Rules) -> None:
    """Have state dicts, copies and pickles of an optimizer whose states are encoded go by these rules."""
    hooks = (
        optimizer.register_state_dict_post_hook(_saving),
        optimizer.register_load_state_dict_pre_hook(_loading),
        optimizer.register_load_state_dict_post_hook(_loaded),
    )
    RULES[optimizer] = rules, hooks
    optimizer.__dict__[REDUCE] = functools.partial(_reduced, weakref.ref(optimizer))


def _reduced(of: Callable[[], Optimizer | None], protocol: int) -> tuple[Any, ...]:
    """What ``copy.deepcopy`` and ``pickle`` make a copy from: torch's part with plain states, and the rules by parameter."""
    optimizer = of()
    assert optimizer is not None
    rules = RULES[optimizer][0]
    parts = optimizer.__getstate__() | {
        "state": checkpoint.fp8_as_uint8({p: _plain(state) for p, state in optimizer.state.items()})
    }
    return _made_again, (type(optimizer), parts, rules.state_format, dict(rules.patterns), rules.known_of(optimizer))


def _made_again(
    kind: type[Optimizer], parts: State, state_format: StateFormat, patterns: dict[str, StateFormat], known: Known
) -> Optimizer:
    """The copy of a compressed optimizer."""
    optimizer = kind.__new__(kind)
    optimizer.__setstate__(parts)
    names = {id(p): name for p, name, _, _ in known if name is not None}
    overrides = {id(p): fmt for p, _, _, fmt in known if fmt is not None}
    embeddings = frozenset(id(p) for p, _, is_embedding, _ in known if is_embedding)
    rules = Rules(state_format, Names(names, embeddings, overrides), patterns)
    optimizer.state.update(rules.encodings(optimizer))
    _follow(optimizer, rules)
    return optimizer


def _plain(state: Mapping[str, Any]) -> State:
    """A state as fp8compile.optim keeps it: the parts under their own keys."""
    plain: State = {}
    for name, value in state.items():
        if isinstance(value, EncodedTensor):
            plain |= {f"{name}.{value.format}.{part}": t for part, t in value.parts.items()}
        else:
            plain[name] = value
    return plain


def _saving(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = [group | {checkpoint.VERSION_KEY: checkpoint.VERSION} for group in state_dict["param_groups"]]
    states = {key: _plain(state) for key, state in state_dict["state"].items()}
    return {**state_dict, "state": checkpoint.fp8_as_uint8(states), "param_groups": groups}


def _loading(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
    """Encode what is loaded. Whether it fits groups and parameters is checked here, before torch loads anything."""
    states, saved = checkpoint._taken_apart(state_dict)
    rules, groups = RULES[optimizer][0], []
    for ours, theirs in checkpoint._pairs(cast(Any, optimizer), saved):
        kept = {k: v for k, v in theirs.items() if k not in checkpoint.OUR_GROUP_KEYS} | FIXED
        groups.append(kept | {k: ours[k] for k in ours.keys() & {"state_format"}})
        for p, key in zip(ours["params"], theirs["params"], strict=True):
            if key in states:
                states[key] = rules.encoded(p, ours, states[key], key)
    return {**state_dict, "state": states, "param_groups": groups}


def _loaded(optimizer: Optimizer) -> None:
    """Give a state to parameters that had none in what was loaded."""
    rules = RULES[optimizer][0]
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            optimizer.state[p] = optimizer.state[p] or rules.encoded(p, group, {}, i)
