"""Every test starts with a clean Dynamo; the session has an Inductor cache of its own, so that nothing is warm by chance.

``make test`` takes some twelve minutes on two cores. With ``--all`` every case of slow tests runs (tests/nightly.py).
A test that is marked ``sweep`` runs with ``--sweep`` only: it is slow, and a shorter one of its kind is not (``make sweep``).
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one process per core (pytest-xdist): threads would only wait
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fp8compile-tests-")

import pytest
import torch
import torch._dynamo.guards

from fp8compile import _torch as private
from fp8compile.compiler import report_store
from fp8compile.compiler.cpu_vectors import WARNING
from fp8compile.fx import spec
from tests.nightly import NIGHTLY, waits
from tests.slow import SLOW, matching
from tests.support.browser import browser

# What torch writes down of every graph for its logs, and how long it takes to evaluate guards: a quarter of a test's time.
# pytest listens to each logger that does not propagate; this one is of graphs, and they are written if anyone listens.
private.trace_log.propagate = True
assert callable(torch.fx.GraphModule.print_readable) and callable(torch._dynamo.guards.profile_guard_manager)
torch.fx.GraphModule.print_readable = lambda *args, **options: ""  # type: ignore[method-assign, assignment]
torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0

spec.enabled = True  # every graph that any test compiles is held against the specification after every pass


# Files whose few tests take minutes come first, where xdist would put them last (--no-loadscope-reorder): one process alone
# would end with them.
LONG = (
    "tests/sm90/",
    "tests/test_docs.py",
    "tests/compiler/test_cache.py",
    "tests/system/test_layer.py",
    "tests/system/test_models.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every case of slow tests, as make test-all does")
    parser.addoption("--sweep", action="store_true", help="run what takes long too: whole sweeps, all lowered cases")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep: runs with --sweep only")


def pytest_collection_finish() -> None:
    """What is imported by now is looked at by no collection of cycles any more: a twentieth of the time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    whole = {Path(each).resolve() for each in config.args} == {Path(__file__).parent} and not config.option.ignore
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONG))
    seen = set[str]()
    for item in items:
        if found := matching(item.nodeid):
            seen.update(found)
            item.add_marker(pytest.mark.sweep)
    if whole and (unused := set(SLOW) - seen):
        raise pytest.UsageError(f"tests/slow.py: no test matches {', '.join(sorted(unused))}")
    known = {part for item in items for part in (item.nodeid, *(item.nodeid.partition(by)[0] for by in ("[", "::")))}
    if whole and (unused := set(NIGHTLY) - known):
        raise pytest.UsageError(f"tests/nightly.py: no test is called {', '.join(sorted(unused))}")
    sweeps, every = config.getoption("--sweep"), config.getoption("--all") or config.getoption("--sweep")
    for item in items:
        if not sweeps and item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.skip(reason="slow: make sweep"))
        elif not every and waits(item.nodeid):
            item.add_marker(pytest.mark.skip(reason="slow: make test-all"))


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_before() -> None:
    """A model of another file, of a class and with parameters alike, is not asked about by this one."""
    report_store._compiled.clear()


@pytest.fixture(autouse=True, scope="module")
def dynamo_as_it_was() -> Iterator[None]:
    """A setting that a file of tests changes and leaves would make tests of other files fail, in some orders."""
    before = torch._dynamo.config.get_config_copy()
    yield
    after = torch._dynamo.config.get_config_copy()
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert not changed, f"this file of tests leaves Dynamo with {changed}: take it back (torch._dynamo.config.patch)"


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    report_store._warned.add(WARNING)  # of some machines' C++ compiler: no test that counts warnings is to meet it
    yield
    torch._dynamo.reset()


@pytest.fixture
def vnni() -> Iterator[None]:
    """Every CPU multiplies INT8: ``_int_mm`` runs on all, if slowly."""
    with mock.patch.object(private, "cpu_has_vnni", lambda: True):
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser that all tests of pages share: a process can have one."""
    with browser() as running:
        yield running
