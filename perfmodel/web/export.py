"""A view as a page that anyone can host: its answers and plots, without form and server."""

import json
from importlib.resources import files
from pathlib import Path

from perfmodel.commands.request import QUIET, Console
from perfmodel.errors import SpecError
from perfmodel.web.pages import Pages
from perfmodel.web.service import QueryService
from perfmodel.web.state import read_state
from perfmodel.web.views import VIEWS, find_view

_FILES = ("app.css", "choices.css", "plots.js", "icon.svg", "vendor/plotly-basic.min.js")


def export_page(address: str, folder: Path, console: Console = QUIET) -> None:
    """Write the view of `address`, a path and query as the page has them (`pareto?model=...`), to `folder`: index.html,
    what it needs, and data.json, the answers that it shows. Raises SpecError for an address without such a view, a
    part that is refused, and a folder that cannot be written."""
    name, _, query = address.rpartition("://")[2].partition("?")
    view, state = find_view(name.rpartition("/")[2]), read_state(query)
    if view is None:
        raise SpecError(
            f"--view: got {address[:80]!r}; expected the end of a page's address, as pareto?model=llama-3.1-8b: "
            f"{', '.join(item.name for item in VIEWS)}."
        )
    if state.left_out:
        raise SpecError(f"--view: {' '.join(state.left_out)}")
    service = QueryService()
    try:
        parts = [part for part in view.parts if not part.on_demand]
        requests = [r for part in parts for ask in (part.ask, part.later) if ask is not None for r in ask(state)]
        answers = []
        for done, request in enumerate(requests):
            console.say(f"{done + 1} of {len(requests)}: {request.line}")
            answer = service.answer(request)
            if answer.shown is None:
                raise SpecError(f"{request.line}: {answer.refusal}")
            answers.append({"command": request.line, "answer": answer.shown.data})
        html = Pages(service, "").exported(view, state)
    finally:
        service.uploads.close()  # no worker was started
    static = files("perfmodel.web").joinpath("static")
    content = {name.rpartition("/")[2]: static.joinpath(name).read_bytes() for name in _FILES}
    content["index.html"] = html.encode()
    content["data.json"] = json.dumps(answers, indent=2, allow_nan=False, ensure_ascii=False).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in content.items():
            (folder / file).write_bytes(data)
    except OSError as error:
        raise SpecError(f"--export {folder}: {error.strerror}; name a folder that can be written.") from None
