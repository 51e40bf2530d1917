"""`QueryService`: answers closed forms at once, others in workers, with uploads resolved and their paths hidden. Also
converts states from and to `vllm serve` lines and resolved fields."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.commands.catalog import answer_line
from perfmodel.commands.request import QUIET, CommandRequest, Console
from perfmodel.commands.runs import SimulateRequest
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.web import results
from perfmodel.web.jobs import BackgroundJob, JobQueue, Lane
from perfmodel.web.state import PageState, request_of

if TYPE_CHECKING:
    from perfmodel.specs.scenario import Scenario


def read_line(text: str, state: PageState, folder: Path) -> tuple[PageState, tuple[str, ...]]:
    """(state, notes) of a server's command line and optional load test, on the page's device. Only uploads in `folder`
    are read. Raises SpecError as `perfmodel new`."""
    device = state.flags.get("hardware")
    given = {} if device is None else {"hardware": results.resolved(device, folder)}
    with only_dropped(folder):
        answer = answer_line(text, "line", folder, given)
    fields: dict[str, str] = {}
    for block, value in answer.data.items():
        if isinstance(value, Mapping):
            fields |= {f"{block}.{key}": _text(item) for key, item in value.items()}
        elif block != "name":
            fields[block] = _text(value)
    return PageState(tuple({**fields, "hardware": device or fields["hardware"]}.items())), answer.result


def _text(value: Any) -> str:
    from perfmodel.files.yaml_loader import parse_value

    with suppress(SpecError):
        if isinstance(value, str) and parse_value(value, "line") == value:
            return value
    return json.dumps(value)


def resolved_fields(state: PageState, folder: Path) -> dict[str, Any]:
    """Resolved scenario fields of a state; folder: uploads. Raises SpecError for an invalid scenario."""
    from perfmodel.cost.calibrations.provenance import resolved as fields_of

    fields: dict[str, Any] = fields_of(_scenario(state, folder))
    return fields


def _scenario(state: PageState, folder: Path) -> "Scenario":
    request: SimulateRequest = results.with_files(request_of(SimulateRequest, state), folder)
    with only_dropped(folder):
        return request.load()


def serve_line(state: PageState, folder: Path) -> list[str]:
    """Shell lines that start the deployment. Raises SpecError for an invalid scenario."""
    from perfmodel.planning.export import start_lines

    lines = start_lines(_scenario(state, folder))
    return [results.without_marks(results.hidden(line, folder)) for line in lines]


def scenario_file(state: PageState, folder: Path) -> tuple[str, str]:
    """(name, text) of a YAML file that says what the state says. Raises SpecError for an invalid scenario, and for a
    changed device, which is a file of its own."""
    from perfmodel.files.yaml_loader import Positions, dump_yaml
    from perfmodel.specs.overrides import apply_override, parse_override
    from perfmodel.specs.scenario_source import read_scenario

    scenario = _scenario(state, folder)
    request = results.with_files(request_of(SimulateRequest, state), folder)
    data: dict[str, Any] = read_scenario(request.source())[0].data
    for change in map(parse_override, request.overrides):
        if len(change.path) > 1 and change.path[0] == "hardware":
            raise SpecError(f"{change.text}: a scenario names its device; copy the device's file and change it there.")
        if change.path[0] != "traffic":
            apply_override(change, data, change.path, Positions(scenario.name))
    data["traffic"] = scenario.traffic.model_dump(mode="json", exclude_defaults=True, exclude={"name", "source"})
    return f"{scenario.name}.yaml", results.hidden(dump_yaml({"name": scenario.name, **data}), folder)


@contextmanager
def only_dropped(folder: Path) -> Iterator[None]:
    """Context that allows only uploads and hides their folder in errors."""
    from perfmodel.files.sandbox import restrict_paths

    try:
        with restrict_paths((folder,)):
            yield
    except PerfmodelError as error:
        raise SpecError(results.hidden(str(error), folder)) from None


_WARM_UP = request_of(SimulateRequest, PageState(), "traffic.num_requests=8")


@dataclass(frozen=True)
class QueryState:
    """A request's answer, refusal or job."""

    request: CommandRequest
    shown: results.QueryResult | None = None
    refusal: str = ""
    job: BackgroundJob | None = None


class QueryService:
    """Answers requests. uploads: files that pages were given; known: result cache; jobs: job queue"""

    def __init__(self) -> None:
        self.uploads = results.Uploads()
        work = partial(_answer, self.uploads.folder)
        self.known = results.ResultCache(partial(work, console=QUIET))
        self.jobs = JobQueue(self.known, work)

    async def start(self) -> None:
        """Start workers, and warm up the quick one."""
        await self.jobs.start()
        self.jobs.begin(_WARM_UP, "quick")

    async def close(self) -> None:
        """Stop workers and delete uploads."""
        await self.jobs.close()
        self.uploads.close()

    def take(self, name: str, content: bytes, full_size: int | None = None) -> str:
        """Store an upload; see `Uploads.take`."""
        mark = self.uploads.take(name, content, full_size)
        self.known.forget_refusals()  # of requests that missed it
        return mark

    def answer(self, request: CommandRequest) -> QueryState:
        """Answer a closed form; called in a thread."""
        try:
            return QueryState(request, self.known.answer(request))
        except PerfmodelError as error:
            return QueryState(request, refusal=str(error))

    def look(self, request: CommandRequest) -> QueryState:
        """State of a request, without starting work."""
        try:
            shown = self.known.find(request)
        except PerfmodelError as error:
            return QueryState(request, refusal=str(error))
        job = None if shown else self.jobs.last(request)
        # What was answered once and is not known any more is asked anew.
        return QueryState(request, shown, job=None if job and job.state in ("done", "refused") else job)

    def begin(self, requests: Sequence[CommandRequest], lane: Lane, reader: str = "") -> list[BackgroundJob]:
        """Queue unknown requests in `lane`; unshared earlier work of `reader` stops. SpecError if the queue is full."""
        if reader:
            self.jobs.leave(reader, requests)
        looks = [self.look(request) for request in requests]
        return [self.jobs.begin(look.request, lane, reader) for look in looks if not (look.shown or look.refusal)]

    def join(self, requests: Sequence[CommandRequest], reader: str) -> None:
        """Add `reader` to running jobs, as after a page reload."""
        for request in requests if reader else ():
            job = self.jobs.last(request)
            if job is not None and not job.is_over:
                self.jobs.join(job, reader)

    def stop(self, request: CommandRequest) -> None:
        job = self.jobs.last(request)
        if job is not None and not job.is_over:
            self.jobs.stop(job)


def _answer(folder: Path, request: CommandRequest, console: Console) -> results.QueryResult:
    """Answer in this process, with upload paths hidden."""
    placed = results.with_files(request, folder)
    with only_dropped(folder):
        shown = results.run_query(placed, console, (folder,))
    if placed == request:
        return shown
    plain = (shown.data, shown.document, shown.files, shown.measured)
    return results.QueryResult(request, *(_all_hidden(part, folder) for part in plain))


def _all_hidden(value: Any, folder: Path) -> Any:
    """`hidden` on each text in plain data."""
    if isinstance(value, str):
        return results.hidden(value, folder)
    if isinstance(value, Mapping):
        return {_all_hidden(key, folder): _all_hidden(item, folder) for key, item in value.items()}
    return [_all_hidden(item, folder) for item in value] if isinstance(value, list | tuple) else value
