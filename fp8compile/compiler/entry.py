"""What the entry point group ``torch_dynamo_backends`` loads when a user names the backend."""

from __future__ import annotations

from fp8compile.compiler.backend import fp8compile
from fp8compile.compiler.nothing_compiled import watch

__all__ = ["fp8compile"]

watch()
