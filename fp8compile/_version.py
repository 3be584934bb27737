"""Which torch this release was made for; said at import, where it can still be mended."""

from __future__ import annotations

import re

__version__ = "0.1.0"

OLDEST, TOO_NEW = (2, 11), (2, 14)


def check_torch(version: str | None = None) -> None:
    """Raise ImportError if torch is older or newer than this release supports."""
    if version is None:
        import torch

        version = torch.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= release < TOO_NEW:
        return
    oldest, too_new = (".".join(map(str, v)) for v in (OLDEST, TOO_NEW))
    raise ImportError(
        f"fp8compile works on torch >= {oldest}, < {too_new}; this is torch {version}. "
        f"Cure: pip install 'torch>={oldest},<{too_new}'"
    )
