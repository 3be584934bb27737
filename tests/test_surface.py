"""The public surface: light to import, whole once it is used, the same for type checkers; which torch it takes."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import fp8compile
from fp8compile._version import torch_version


def answer(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own says to some lines of code."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def printed(code: str) -> list[str]:
    """The words that a process of its own prints."""
    done = answer(code)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, fp8compile; print(*{'torch', 'numpy', 'rich'} & set(sys.modules), fp8compile.__version__)"
    assert printed(code) == [fp8compile.__version__]


def test_every_name_is_there() -> None:
    code = (
        "import fp8compile as f; print(*(f'{n}:{getattr(f, n).__name__}' for n in f.__all__ if n != '__version__'))"
    )
    assert printed(code) == [
        f"{name}:{'fp8compile.' if name in ('amp', 'optim') else ''}{name}"
        for name in fp8compile.__all__
        if name != "__version__"
    ]
    assert set(fp8compile.__all__) <= set(dir(fp8compile))
    shown = [name for name in dir(fp8compile) if not name.startswith("_")]
    assert len(shown) == 12 + len(fp8compile._ROOMS), "twelve names, and the rooms where the others are"
    assert all(importlib.import_module(f"fp8compile.{room}") for room in fp8compile._ROOMS)


def test_a_star_import_brings_them_all() -> None:
    assert printed("from fp8compile import *; import fp8compile; print(set(fp8compile.__all__) <= set(dir()))") == [
        "True"
    ]


@pytest.mark.parametrize("name", ["amp.LossScaler", "optim.AdamW", "passes.__path__", "numerics.codecs.Codec"])
def test_submodules_are_attributes(name: str) -> None:
    assert printed(f"import fp8compile; print(fp8compile.{name} is not None)") == ["True"]


def test_a_submodule_may_come_first() -> None:
    code = "import fp8compile.tools.explain, fp8compile; print(fp8compile.explain.__name__, fp8compile.amp.__name__)"
    assert printed(code) == ["explain", "fp8compile.amp"]


@pytest.mark.parametrize("name", ["exlpain", "_nothing", "__wrapped__"])
def test_what_is_not_there_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'fp8compile' has no attribute '{name}'"):
        getattr(fp8compile, name)


@pytest.mark.parametrize("package", [fp8compile, fp8compile.tools], ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names_from_the_same_modules(package: types.ModuleType) -> None:
    assert package.__file__
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    homes = {a.name: n.module for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert homes.pop("__version__", "fp8compile._version") == "fp8compile._version"
    modules = {name: f"fp8compile.{name}" for name, home in homes.items() if home == "fp8compile"}
    assert homes | modules == package._HOMES
    (listed,) = (ast.literal_eval(n.value) for n in stub.body if isinstance(n, ast.Assign))
    assert listed == sorted(package.__all__)


def test_few_names_are_public() -> None:
    """Twelve, and the version; what is for looking on has a room."""
    assert len(set(fp8compile.__all__) - {"__version__"}) == 12


@pytest.mark.parametrize("name", ["tools.debug_step", "tools.overflow_report", "extras.watching.watch"])
def test_what_is_in_a_room_comes_where_it_is_used(name: str) -> None:
    before = f"import sys, fp8compile; fp8compile.{name.partition('.')[0]}; print('torch' in sys.modules)"
    assert printed(f"{before}; print(callable(fp8compile.{name}))") == ["False", "True"]


@pytest.mark.parametrize("room", ["tools", "extras"])
def test_what_is_not_in_a_room_is_an_attribute_error(room: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'fp8compile.{room}' has no attribute 'wacth'"):
        getattr(fp8compile, room).wacth  # noqa: B018


# ---------------------------------------------------------------------------------------------------------- torch


def test_the_version_is_read_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_version() == torch.__version__
    assert "torch" not in sys.modules


@pytest.mark.parametrize(
    "way_in",
    [
        "import fp8compile",
        "import fp8compile.optim",
        "from fp8compile.compiler.entry import fp8compile",
        "from fp8compile.cli import main",
    ],
)
def test_another_torch_is_refused_on_every_way_in(way_in: str, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('an unsupported torch was imported')")
    (tmp_path / "torch" / "version.py").write_text("debug = False\n__version__ = '2.5.1+cu124'\n")
    done = answer(way_in, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "ImportError: fp8compile works on torch>=2.11,!=2.14.*,<2.16; this is torch 2.5.1+cu124. "
        "Fix: pip install 'torch>=2.11,!=2.14.*,<2.16'"
    )


def test_a_torch_that_tells_its_version_elsewhere_is_asked(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '3.0'")
    assert "this is torch 3.0." in answer("import fp8compile", PYTHONPATH=str(tmp_path)).stderr
