"""The notebooks run as they are, without outputs that would age, and say what they say from their own folder."""

import json

import pytest

pytest.importorskip("nbclient", reason="notebooks are run with the extra `docs` or `test`")
pytest.importorskip("ipykernel", reason="notebooks are run with the extra `docs` or `test`")

from docs_site.notebooks import FOLDER, as_page, executed, read_notebook

pytestmark = pytest.mark.release

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    found = executed(path, tmp_path)
    outputs = [each for cell in found["cells"] for each in cell.get("outputs", ())]
    assert not [each for each in outputs if each["output_type"] == "error" or each.get("name") == "stderr"]
    assert len(outputs) >= 3
    assert as_page(found, path.name).count("```text\n") >= 3


def test_there_are_three():
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_outputs_and_is_valid(path):
    nbformat = pytest.importorskip("nbformat", reason="checked with the extra `docs` or `test`")
    nbformat.validate(nbformat.read(path, as_version=4))
    for cell in read_notebook(path)["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)


def test_a_result_is_its_text_and_shows_nothing_by_itself_in_a_notebook(tmp_path):
    """rich writes to a notebook's display, not to its file, unless told otherwise."""
    run = "pm.simulate('llama-3.1-8b-a100', {'traffic.num_requests': 8})"
    source = f"import perfmodel as pm\nlen(str({run})) > 500"
    cell = {"cell_type": "code", "id": "a", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    outputs = executed(path, tmp_path)["cells"][0]["outputs"]
    assert [each["data"]["text/plain"] for each in outputs] == [["True"]]
