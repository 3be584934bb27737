"""What the entry point group ``torch_dynamo_backends`` loads when a user names the backend."""

from __future__ import annotations

from fp8compile.compiler.backend import fp8compile
from fp8compile.compiler.report_store import warn_at_exit_if_nothing_compiled

__all__ = ["fp8compile"]

warn_at_exit_if_nothing_compiled()
