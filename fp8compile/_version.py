"""Which torch this release was made for; checked at import, where it can still be fixed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

__version__ = "0.1.0"

OLDEST, TOO_NEW = (2, 11), (2, 16)
CORRUPTS = (
    "the assembler of its triton 3.8 corrupts an FP8 value that a kernel for sm_90 stores both contiguous and transposed "
    "(triton issue 11111)"
)
BROKEN = {(2, 14): CORRUPTS}  # releases between these, and why
WANTED = "torch>=2.11,!=2.14.*,<2.16"


def check_torch(version: str | None = None) -> None:
    """Raise ImportError if torch is older or newer than this release supports; by default, the torch of this process.

    Without torch nothing is raised here: the first module that needs it raises Python's own ModuleNotFoundError.
    """
    version = torch_version() if version is None else version
    if version is None:
        return
    release = release_of(version)
    if OLDEST <= release < TOO_NEW and release not in BROKEN:
        return
    why = f": {BROKEN[release]}" if release in BROKEN else ""
    raise ImportError(f"fp8compile works on {WANTED}; this is torch {version}{why}. Fix: pip install '{WANTED}'")


def release_of(version: str) -> tuple[int, int]:
    """``"2.13.0+cpu" -> (2, 13)``; (0, 0) for a text that begins otherwise."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def torch_version() -> str | None:
    """The version of the torch that is imported or would be; None: there is none.

    Importing torch takes seconds; ``torch/version.py``, from which ``torch.__version__`` comes, is read as text.
    """
    if (loaded := sys.modules.get("torch")) is not None:
        return str(loaded.__version__)
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder, "version.py")
        if file.is_file() and (found := re.search(r"^__version__ = ['\"](.+)['\"]", file.read_text(), re.MULTILINE)):
            return found[1]
    import torch  # a build that keeps its version elsewhere

    return str(torch.__version__)
