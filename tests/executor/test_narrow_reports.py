"""What executing and comparing show, whole on a terminal of 80 columns."""

import pytest

pytest.importorskip("torch")

from narrow_terminal import faults_on
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.report import terminal

FEW = ("--set", "traffic.num_requests=4")


@pytest.mark.release
@pytest.mark.parametrize(
    "arguments",
    [
        ("execute", "tiny-llama-cpu", *FEW),
        ("validate", "executor", "--measured", "reports/measured/cpu"),
        ("validate", "published", "workloads/scenarios/published/aic_attn-010.yaml"),
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_every_table_is_whole_on_eighty_columns(arguments, monkeypatch, pytestconfig):
    shown = []
    monkeypatch.chdir(pytestconfig.rootpath)
    monkeypatch.setattr(terminal, "show_document", lambda document, console: shown.append(document))
    found = CliRunner().invoke(app, list(arguments))
    assert shown, found.output
    for document in shown:
        assert faults_on(document, 80) == set()
