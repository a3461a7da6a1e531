"""The command line of projections inside the process of the tests."""

import sys
from typing import NamedTuple

import pytest
from hydra.core.global_hydra import GlobalHydra

from graphmoe.config.arguments import run_tool
from graphmoe.project.__main__ import run


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    """Run the command with some words in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def project(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["project", *words])
        GlobalHydra.instance().clear()
        status = 0
        try:
            run_tool(run)
        except SystemExit as end:
            status = int(end.code or 0)
        finally:
            GlobalHydra.instance().clear()
        return Result(status, *capsys.readouterr())

    return project
