"""No buffer of a rewritten graph waits for another of its size, unless the user asks Inductor for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8compile import _torch as private
from fp8compile.compiler.inductor import compile_once
from fp8compile.recipe.recipe import Recipe


@pytest.mark.parametrize(
    ("recipe", "reuse"),
    [
        (Recipe(debug={"codegen": "eager"}), False),
        (Recipe(debug={"codegen": "eager", "inductor": {"allow_buffer_reuse": True}}), True),
        (Recipe.preset("off", debug={"codegen": "eager"}), None),
    ],
)
def test_what_inductor_is_told(recipe: Recipe, reuse: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    compile_fx = private.compile_fx

    def asked(*args: Any, config_patches: dict[str, Any], **kwargs: Any) -> Any:
        told.append(config_patches.get("allow_buffer_reuse"))
        return compile_fx(*args, config_patches=config_patches, **kwargs)

    monkeypatch.setattr(private, "compile_fx", asked)

    def backend(gm: Any, inputs: Any) -> Any:
        return compile_once(gm, inputs, recipe)[0]

    torch.compile(torch.nn.Linear(16, 16), backend=backend)(torch.randn(16, 16)).sum().backward()
    assert told == [reuse]
