"""The package's sources, for tests of the house: by module, and as code without comments and docstrings."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import fp8compile

PACKAGE = Path(fp8compile.__file__).parent
PASSES = Path(fp8compile.passes.__file__).parent
ROOT = Path(__file__).parents[2]
FILES = {f"fp8compile.{'.'.join(p.relative_to(PACKAGE).with_suffix('').parts)}": p for p in PACKAGE.rglob("*.py")}
FILES |= {f"fp8compile.passes.{p.stem}": p for p in PASSES.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}


@functools.cache
def code(path: Path) -> str:
    """A file without its comments and docstrings, a statement a line, strings in single quotes."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def imports(path: Path) -> set[str]:
    """What a file imports, wherever in it that stands; a module, or a name in one."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found
