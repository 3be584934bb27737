"""What is in the zoo: every model is a declared value.

    ZooModel   a name, a family, a function that builds the model, and one that gives its batches by number
    models()   all of them, imported when they are asked for: each family needs its own package

Models are tiny, but most of their linears are large enough for FP8. None has dropout, so that arms differ by their
arithmetic alone. What a model draws at random otherwise is part of its batch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.batches import Batch, own_loss
from benchmarks.studies.models import Case

MODULES: Mapping[str, tuple[str, ...]] = {  # by the package that a family needs; "plain" needs torch alone
    "plain": ("plain_sequences", "plain_vision", "plain_tables", "plain_layers"),
    "diffusers": ("diffusers_models",),
    "timm": ("timm_models",),
    "transformers": ("transformers_other", "transformers_encoders", "transformers_models"),
}
RATE = 5e-4  # of AdamW
# Run in CI and by --subset: each has an arm of the passes that the others lack, and takes seconds.
SUBSET = ("lstm_cell", "nn_lstm", "gan", "gnn", "realnvp", "dlrm", "dense_moe", "unet", "lora", "tied_lm")


@dataclass(frozen=True)
class ZooModel:
    """One model of the zoo.

    Attributes:
        name: unique in the zoo.
        family: "transformers", "timm", "diffusers" or "plain".
        make: builds the model, FP32, with random weights.
        batch: the batch of that number, the same for every call; made to be learnt within some steps.
        loss: of the model's output for a batch, a scalar.
        rate: learning rate of AdamW.
        note: what a reader of its row should know.
        dynamo: settings of ``torch._dynamo.config`` that it is compiled under.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Batch], Tensor] = own_loss
    rate: float = RATE
    note: str = ""
    dynamo: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> AbstractContextManager[None]:
        """Within it Dynamo is set as the model wants it."""
        return torch._dynamo.config.patch(dict(self.dynamo))

    def case(self, seed: int) -> Case:
        """The model with the weights of that seed, in training mode, as the studies measure it."""
        torch.manual_seed(seed)
        return Case(self.note, self.make().train(), self.batch, self.loss)


def models(families: tuple[str, ...] | None = None) -> dict[str, ZooModel]:
    """The zoo by name, in the order of ``MODULES``.

    Args:
        families: packages to look at, keys of ``MODULES``; None: those that are installed.

    Raises:
        ValueError: two models of one name.
    """
    wanted = installed() if families is None else families
    found: dict[str, ZooModel] = {}
    for name in (name for family, names in MODULES.items() if family in wanted for name in names):
        for model in importlib.import_module(f"benchmarks.zoo.{name}").MODELS:
            if model.name in found:
                raise ValueError(f"two models of the zoo are called {model.name!r}. Rename one in {name}.py.")
            found[model.name] = model
    return found


def installed() -> tuple[str, ...]:
    """The packages of ``MODULES`` that are here."""
    return tuple(name for name in MODULES if name == "plain" or importlib.util.find_spec(name))
