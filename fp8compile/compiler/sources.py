"""A hash of the package's sources: what compiled code depends on, as Inductor's ``torch_key`` is a hash of all of torch.

So no list of files has to be kept, and no file can be forgotten. The price: after a change of a report's wording everything
is compiled again. What only uses the package or shows what it did (``USERS``) is left out.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from fp8compile import passes
from fp8compile._version import __version__

# Folders of the package that use the compiler and are not used by it.
USERS = ("cli", "extras", "pages")


@functools.cache
def sources_key() -> str:
    """16 hexadecimal digits of the sources and of the versions of this package and of torch."""
    digest = hashlib.sha256(f"{__version__} {torch.__version__}".encode())
    for name, path in sources():
        digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def sources() -> Iterator[tuple[str, Path]]:
    """Each source file with its name in the package, in the order of names; ``passes`` may lie beside the package."""
    package, beside = Path(__file__).parents[1], Path(passes.__file__).parent
    found = {
        path.relative_to(package).as_posix(): path for kind in ("py", "cpp") for path in package.rglob(f"*.{kind}")
    }
    found |= {f"passes/{path.relative_to(beside).as_posix()}": path for path in beside.rglob("*.py")}
    yield from sorted(
        (name, path) for name, path in found.items() if not name.startswith(tuple(f"{u}/" for u in USERS))
    )
