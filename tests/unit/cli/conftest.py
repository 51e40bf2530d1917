"""Fixtures of the command-line tests."""

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a command in an empty folder with an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(arg) for arg in args])
