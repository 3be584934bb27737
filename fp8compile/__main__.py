"""``python -m fp8compile``: the command line."""

from __future__ import annotations

import sys

from fp8compile.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
