"""Notebooks: run in a kernel of their own, and shown as pages.

They are committed without outputs, which would age; the site's are those of its build.
"""

__all__ = ["FOLDER", "as_page", "executed", "read_notebook"]

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs_site.places import ROOT

FOLDER = ROOT / "docs" / "notebooks"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_SECONDS = 120


def read_notebook(path: Path) -> dict[str, Any]:
    """The notebook as it is in its file."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def executed(path: Path, scratch: Path) -> dict[str, Any]:
    """The notebook with its outputs, run beside its file. Raises nbclient's error where a cell fails.

    The kernel is this interpreter's, with the checkout's packages, whatever kernels the machine has. What is kept
    between runs goes into the folder `scratch`, not into the user's.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "executors"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "100", "NO_COLOR": "1"}
    environment |= {"IPYTHONDIR": str(scratch), "XDG_CACHE_HOME": str(scratch)}
    kernel = AsyncKernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    quiet = ["--IPKernelApp.log_level=40"]  # it warns of other users of the loopback each time
    client = NotebookClient(notebook, km=kernel, timeout=_MAX_SECONDS, extra_arguments=quiet)
    client.execute(cwd=str(path.parent), env=environment)
    result: dict[str, Any] = json.loads(nbformat.writes(notebook))  # type: ignore[no-untyped-call]
    return result


def as_page(notebook: dict[str, Any], name: str) -> str:
    """The Markdown of a notebook with the outputs that it has; `name`: of its file, for who wants to run it."""
    parts = [_cell(cell) for cell in notebook["cells"]]
    parts.insert(
        1, f'A notebook: <a href="{name}" download>docs/notebooks/{name}</a>. Its outputs are those of this build.\n'
    )
    return "\n".join(parts)


def _joined(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with what one stream was sent in pieces as one output."""
    joined = list[dict[str, Any]]()
    for output in outputs:
        if joined and output["output_type"] == "stream" and output.get("name") == joined[-1].get("name"):
            joined[-1] = {**joined[-1], "text": ["".join(joined[-1]["text"]), "".join(output["text"])]}
        else:
            joined.append(output)
    return joined


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source + "\n"
    outputs = "".join(_output(item) for item in _joined(cell.get("outputs", [])))
    return f"```python\n{source}\n```\n\n{outputs}"


def _output(output: dict[str, Any]) -> str:
    return "\n".join(_shown(output)) + "\n"


def _shown(output: dict[str, Any]) -> Iterator[str]:
    if output["output_type"] == "stream":
        if output["name"] == "stdout":
            yield _text("".join(output["text"]))
    elif output["output_type"] in ("execute_result", "display_data"):
        data = output["data"]
        if "image/svg+xml" in data:
            yield "".join(data["image/svg+xml"]) + "\n"
        elif "text/plain" in data:
            yield _text("".join(data["text/plain"]))


def _text(text: str) -> str:
    return f"```text\n{_COLOURS.sub('', text).rstrip()}\n```\n"
