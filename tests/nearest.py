"""The tests nearest to what is changed: those of the same name, else those of the same room; and the structure.

python -m tests.nearest [COMMIT]    what differs from COMMIT (by default the last one), in a minute at most
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 60
ALWAYS = ("tests/test_structure.py", "tests/test_concepts.py")


def changed(commit: str) -> list[str]:
    """Paths that differ from a commit, those that git does not know yet among them."""
    commands = (["git", "diff", "--name-only", commit], ["git", "ls-files", "--others", "--exclude-standard"])
    found = (subprocess.run(c, cwd=ROOT, capture_output=True, text=True, check=True).stdout for c in commands)
    return [line for text in found for line in text.splitlines()]


def nearest(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Test files and folders for changed files: ``fp8compile/optim/plan.py`` has those of ``tests/optim``."""
    found: dict[str, None] = {}
    for path in map(Path, paths):
        if path.suffix != ".py" or path.parts[0] not in ("fp8compile", "passes", "tests", "benchmarks"):
            continue
        for test in [path] if path.name.startswith("test_") else _of(path, root):
            if (root / test).exists():
                found[test.as_posix()] = None
    return [*found, *ALWAYS]


def _of(path: Path, root: Path) -> list[Path]:
    if path.parts[0] == "tests":
        return []  # helpers: whoever reads them is found by what else is changed
    room = Path("tests", *(path.parts[1:-1] if path.parts[0] == "fp8compile" else path.parts[:1]))
    named = sorted((root / room).glob(f"test_{path.stem}*.py"))
    return [each.relative_to(root) for each in named] or ([room] if room != Path("tests") else [])


def main(arguments: list[str]) -> int:
    tests = nearest(changed(arguments[0] if arguments else "HEAD"))
    print(f"{SECONDS} s of: {' '.join(tests)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-n0", f"--session-timeout={SECONDS}", *tests]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
