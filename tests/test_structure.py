"""The house: rooms in one order, imports that point down, short files, private torch APIs in one place."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import networkx
import pytest

import fp8compile
from fp8compile.compiler.sources import USERS, sources
from fp8compile.reporting.report import Report
from tests.support.sources import FILES, MODULES, PACKAGE, ROOT, imports

# A file imports from its own room or from one that stands higher in this list; rooms on one line do not know each other.
# Imports inside functions and those for the type checker count as all others do.
ORDER = (
    ("_torch", "_version", "_arguments", "_messages", "_text", "numerics", "pages"),
    ("fx", "_distributed"),
    ("explorer", "cost"),
    ("recipe", "analysis", "reporting", "optim"),
    ("observe",),
    ("saved", "linears", "memory", "islands", "amp"),
    ("passes",),
    ("compiler",),
    ("whole_step",),
    ("tools",),
    ("fp8compile",),  # the public surface
    ("integrations", "extras"),
    ("cli",),
    ("__main__",),
)
MOST_NOUNS = 25  # in the glossary
LINES_OF_AN_EXAMPLE = 50
MOST_MODULES = 8  # directly in the package; what has a role has a room
PRIVATE = (
    "torch._inductor",
    "torch._functorch",
    "torch._dynamo",
    "torch._guards",
    "torch._logging",
    "torch._subclasses",
    "functorch",
)


# Two classes of one name: only where other libraries' conventions force it.
SHARED_NAMES = {
    "Fp8CompileCallback": "trainers look for a callback by the name of its library: Lightning's and transformers'",
    "Config": "torchtitan finds a component's options in a nested class of this name",
}


def imported_modules(name: str) -> set[str]:
    """Our modules that a module imports: of ``from a.b import c`` a.b.c, if that is one, and else a.b.

    A string that is the name of a module counts too: that is how the public surface and the commands import when used.
    """
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {each if each in MODULES else str(node.module) for each in within}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            found.add(node.value)
    return found & set(MODULES)


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "fp8compile"


def level(module: str) -> int:
    return next(i for i, rooms in enumerate(ORDER) if room(module) in rooms)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    up = [m for m in imported_modules(name) if room(m) != room(name) and level(m) >= level(name)]
    assert not up, f"{name} is on floor {level(name)} of ORDER and imports {up}"


def test_what_stands_beside_the_core_knows_none_of_its_kind() -> None:
    def satellite(module: str) -> str:
        return ".".join(module.split(".")[:3])

    ours = [name for name in MODULES if room(name) == "extras"]
    others = {name: {m for m in imported_modules(name) if room(m) == "extras"} for name in ours}
    assert [name for name in ours if {satellite(m) for m in others[name]} - {satellite(name)}] == []
    users = {room(name) for name in MODULES for m in imported_modules(name) if room(m) == "extras"}
    assert users <= {"extras", "cli"}


def test_no_circles() -> None:
    graph = networkx.DiGraph([(name, other) for name in MODULES for other in imported_modules(name)])
    assert [sorted(each) for each in networkx.strongly_connected_components(graph) if len(each) > 1] == []


def test_nothing_is_imported_for_the_type_checker_alone() -> None:
    assert [name for name, path in FILES.items() if "TYPE_CHECKING" in path.read_text()] == []


def test_a_class_name_stands_once() -> None:
    trees = [ast.parse(path.read_text()) for path in FILES.values()]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name for name, count in names.items() if count > 1} == set(SHARED_NAMES)


def test_the_glossary_is_short_and_its_nouns_are_in_use() -> None:
    """As a word of a docstring, of a class or of a module."""
    table = (ROOT / "docs" / "glossary.md").read_text().split("## Nouns")[1].split("\n## ")[0]
    nouns = [line.split("|")[1].strip(" `") for line in table.splitlines() if line.startswith("| ")][1:]
    assert 4 < len(nouns) <= MOST_NOUNS and len(set(nouns)) == len(nouns)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [n for path in FILES.values() for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, documented)]
    classes = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", n.name) for n in nodes if isinstance(n, ast.ClassDef)]
    modules = [re.sub(r"[._]", " ", name) for name in MODULES]
    text = " ".join([*(ast.get_docstring(n) or "" for n in nodes), *classes, *modules]).lower()
    assert [noun for noun in nouns if not re.search(rf"\b{noun}e?s?\b", text)] == []


def test_few_modules_outside_of_rooms() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES


def test_numerics_is_maths_on_torch_alone() -> None:
    allowed = {
        "torch",
        "__future__",
        "collections",
        "dataclasses",
        "typing",
        "enum",
        "functools",
        "math",
        "fp8compile",
    }
    for name in (n for n in MODULES if room(n) == "numerics"):
        assert {m.split(".")[0] for m in imports(MODULES[name])} <= allowed, name


def test_no_public_function_hides_a_module() -> None:
    """``import fp8compile.report`` would give a function."""
    assert not {f"fp8compile.{name}" for name in fp8compile.__all__} & (
        set(MODULES) - {"fp8compile.optim", "fp8compile.amp"}
    )
    assert importlib.import_module("fp8compile.reporting.report").Report is Report


def test_names_that_are_imported_when_used_are_seen_by_the_tests_above() -> None:
    assert {"fp8compile.amp", "fp8compile.tools.explain"} <= imported_modules("fp8compile")
    assert "fp8compile.cli.bench" in imported_modules("fp8compile.cli.commands")


def test_every_room_is_packaged_and_says_what_it_is_for() -> None:
    listed = (ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0]
    folders = {name.removesuffix(".__init__") for name in FILES if name.endswith(".__init__")}
    assert {line.strip(' ",') for line in listed.split("\n") if line.strip()} == folders
    assert [name for name in folders if not ast.get_docstring(ast.parse(MODULES[name].read_text()))] == []


@pytest.mark.parametrize("name", sorted(FILES))
def test_private_torch_is_imported_in_one_place(name: str) -> None:
    if name != "fp8compile._torch":
        assert not [m for m in imports(FILES[name]) if m.startswith(PRIVATE)]


@pytest.mark.parametrize("name", sorted(FILES))
def test_no_file_is_long(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= 300


def test_the_cache_key_knows_every_source_but_of_programs() -> None:
    programs = [path for name, path in FILES.items() if room(name) in USERS]
    assert {path for _, path in sources()} == {*FILES.values(), *PACKAGE.rglob("*.cpp")} - set(programs)


def test_rooms_of_benchmarks_know_the_harness_and_the_papers_and_not_each_other() -> None:
    """What stands at the top knows all of them; registry.py knows none."""
    rooms = ("harness", "kernels", "layers", "e2e", "studies", "first", "papers")
    for path in (ROOT / "benchmarks").rglob("*.py"):
        own = path.relative_to(ROOT / "benchmarks").parts[0]
        known = (own, "harness", "registry", "papers") if own in rooms else () if own == "registry.py" else None
        found = {name.split(".")[1] for name in imports(path) if name.startswith("benchmarks.")}
        assert known is None or found <= set(known), path


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_one_short_file(path: Path) -> None:
    """It is pasted as it is: it needs the package and a trainer, and nothing else of this repository."""
    assert len(path.read_text().splitlines()) <= LINES_OF_AN_EXAMPLE
    assert not {name.split(".")[0] for name in imports(path)} & {"examples", "tests", "benchmarks", "argparse"}
    inner = [name for name in imports(path) if name.startswith("fp8compile.")]
    assert [name for name in inner if not name.startswith("fp8compile.integrations.")] == []


def test_a_source_distribution_holds_all_that_the_tests_read() -> None:
    """The wheel holds the package alone; setuptools would leave all but the package out of the other too."""
    said = (ROOT / "MANIFEST.in").read_text().split("\n")
    for folder in ("passes", "tests", "benchmarks", "docs", "examples"):
        assert f"graft {folder}" in said
    kinds = {path.suffix for path in PACKAGE.rglob("*") if path.is_file()} - {".pyc", ""}
    packed = next(line for line in said if line.startswith("recursive-include fp8compile ")).split()
    assert {f"*{kind}" for kind in kinds - {".typed"}} | {"py.typed"} <= set(packed)
