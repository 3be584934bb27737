"""The guide shows what its command prints."""

from __future__ import annotations

import pytest

from fp8compile.cli import main
from tests.support.docs import blocks
from tests.support.sources import ROOT


def test_the_guide_shows_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command, output = blocks((ROOT / "docs/guide/plan.md").read_text())
    name, *arguments = command.text.split()
    assert (command.language, name, output.language) == ("bash", "fp8compile", "text")
    assert main.main(arguments) == 0
    assert capsys.readouterr().out == output.text
