"""The house: imports point one way, every file is short, private torch APIs live in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fp8compile
from fp8compile.compiler.sources import sources

PACKAGE = Path(fp8compile.__file__).parent
PASSES = Path(fp8compile.passes.__file__).parent
FILES = {f"fp8compile.{'.'.join(p.relative_to(PACKAGE).with_suffix('').parts)}": p for p in PACKAGE.rglob("*.py")}
FILES |= {f"fp8compile.passes.{p.stem}": p for p in PASSES.rglob("*.py")}

FLOORS = ["numerics", "passes", "pipeline", "backend"]  # each may import what stands to its left
PRIVATE = (
    "torch._inductor",
    "torch._functorch",
    "torch._dynamo",
    "torch._guards",
    "torch._logging",
    "torch._subclasses",
    "functorch",
)


def imports(path: Path, *, running: bool = False) -> set[str]:
    """What a file imports; ``running``: without what is there for the type checker alone."""
    found = set()
    tree = ast.parse(path.read_text())
    if running:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def floor(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("name", sorted(FILES))
def test_imports_point_one_way(name: str) -> None:
    if floor(name) in FLOORS:
        above = FLOORS[FLOORS.index(floor(name)) + 1 :]
        assert not [m for m in imports(FILES[name]) if m.startswith("fp8compile.") and floor(m) in above]
    if floor(name) == "numerics":
        ours = {m for m in imports(FILES[name]) if not m.startswith("fp8compile.numerics")}
        allowed = ("torch", "__future__", "collections", "dataclasses", "typing", "enum", "functools", "math")
        assert not [m for m in ours if m.split(".")[0] not in allowed], "numerics is maths on torch alone"


@pytest.mark.parametrize("name", sorted(FILES))
def test_private_torch_is_imported_in_one_place(name: str) -> None:
    if name != "fp8compile._torch":
        assert not [m for m in imports(FILES[name]) if m.startswith(PRIVATE)]


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_is_long(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= 300


def test_the_cache_key_knows_every_source_but_of_programs() -> None:
    programs = [p for name, p in FILES.items() if floor(name) in ("demo", "cli")]
    assert {path for _, path in sources()} == set(FILES.values()) - set(programs)
