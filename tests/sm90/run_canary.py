"""Script: replace every name that the harness replaces. Fails with the name that is gone. Prints JSON."""

from __future__ import annotations

from . import fake_h100, interpreter
from .lowering import LoweredGraph, recording
from .measures import print_json


def report() -> dict[str, str]:
    fake_h100.install()
    interpreter.install()
    with recording(LoweredGraph(), lambda kernel: kernel):
        return fake_h100.installed()


if __name__ == "__main__":
    print_json(report)
