"""What the suite and the studies write: JSON, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(path: Path, found: Any) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)
