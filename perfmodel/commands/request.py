"""`CommandRequest`: what a command is asked, as one frozen object, from which its flags and its line follow; `Answer`.

A request is a dataclass: its docstring is the command's help, and each field made by `flag` or `argument` is one of the
command line, with its help. A `ScenarioRequest` is about a scenario: by its name or file, or by flags that stand for
one, `--model llama-3.1-70b --hardware h100`. What those leave open is assumed, and stated in the notes of the answer.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.report.document import Document
    from perfmodel.specs.scenario import Scenario

# Of flags that several commands have.
OVERRIDES_HELP = "Override one field, for example engine.max_num_seqs=64. May be given several times."
REPORT_HELP = "Write FILE.md with pictures, or FILE.html."
SCENARIO_HELP = "A scenario's name, a path to a scenario file, or - for stdin."
SEED_HELP = "Override the scenario's seed."
Progress = Callable[[int, int | None], None]  # called with (done, of how many)
Watch = Callable[[str], AbstractContextManager[Progress | None]]  # a stage's name -> what shows how far it is


@dataclass
class Pace:
    """How fast counted work goes, by what came since its first answers: these say nothing of those right behind them.

    first: how many were done, at which second; None before any"""

    first: tuple[int, float] | None = None
    num_done: int = 0

    def since_first(self, done: int, now_s: float) -> tuple[int, float]:
        """How many came in how many seconds; the first are those given here where a count begins."""
        if self.first is None or done < self.num_done:
            self.first = done, now_s
        self.num_done = done
        return done - self.first[0], now_s - self.first[1]

    def left_s(self, done: int, total: int, now_s: float) -> float | None:
        """Seconds that the others take; None while the first are all there are."""
        count, passed_s = self.since_first(done, now_s)
        return passed_s * max(total - done, 0) / count if count else None


class Console(NamedTuple):
    """How a command tells of its work meanwhile: by default nobody looks. say: takes a sentence"""

    watch: Watch = lambda stage: nullcontext(None)
    say: Callable[[str], None] = lambda sentence: None

    @contextmanager
    def watch_both(self, first: str, then: str) -> Iterator[tuple[Progress | None, Progress]]:
        """What shows how far two stages are; the second begins with its first report, of nothing done."""
        with ExitStack() as stack:
            shown: Progress | None = None

            def report(done: int, total: int | None) -> None:
                nonlocal shown
                if not done:
                    stack.close()
                    shown = stack.enter_context(self.watch(then))
                if shown is not None:
                    shown(done, total)

            yield stack.enter_context(self.watch(first)), report


QUIET = Console()


@dataclass(frozen=True)
class Answer:
    """Data and document are made when they are first used: JSON loads no renderer, a table no provenance.

    make_data:     of what `--json` prints
    make_document: of what is shown
    result:        what both are made of, where there is more to do with it; None of a list
    make_brief:    of what a terminal shows unless details are asked for; None: the whole document
    text:          what is printed in place of a document; is_prose: it is wrapped at the terminal's width
    closing:       lines below the document, not with `--json`
    exit_status:   of the command
    after:         what is done once the answer is printed"""

    make_data: Callable[[], Any] = dict
    make_document: "Callable[[], Document] | None" = None
    result: Any = None
    make_brief: "Callable[[], Document] | None" = None
    text: str = ""
    is_prose: bool = False
    closing: Sequence[str] = ()
    exit_status: int = 0
    after: Callable[[], None] | None = None

    @cached_property
    def data(self) -> Any:
        """What `--json` prints, once `to_jsonable` has replaced what JSON has no word for."""
        return self.make_data()

    @cached_property
    def document(self) -> "Document":
        """What the terminal, a report and a page show."""
        assert self.make_document is not None
        return self.make_document()


@dataclass(frozen=True)
class Flag:
    """What a field of a request is on the command line.

    name:       `--set`, or the metavar of an argument, `SCENARIO`
    completes:  the kind of names that a shell completes
    is_count:   whether 8k and 8K are read as numbers
    panel:      the heading in the help below which it stands
    is_in_line: whether the line that gives an answer again has it: what changes the answer"""

    name: str
    help: str
    metavar: str | None = None
    completes: str = ""
    is_count: bool = False
    is_hidden: bool = False
    shows_default: bool = False
    panel: str | None = None
    low: float | None = None
    high: float | None = None
    is_in_line: bool = True

    @property
    def is_argument(self) -> bool:
        """Whether it stands before the flags."""
        return not self.name.startswith("-")


def view(place: str, *data: Any) -> "Callable[[], Document]":
    """What makes the document of `data`: the view at `place`, as in `run:run_view`, which is loaded then."""

    def make() -> "Document":
        document: Document = resolve_name(f"perfmodel.report.views.{place}")(*data)
        return document

    return make


def flag(name: str, help_text: str, default: Any = None, metavar: str | None = None, **more: Any) -> Any:
    """A field that is a flag. name: `--batch`; help_text: for its line in the help; default, metavar: as of a flag

    more: further fields of `Flag`"""
    return dataclasses.field(default=default, metadata={"flag": Flag(name, help_text, metavar, **more)}, kw_only=True)


def argument(metavar: str, help_text: str, default: Any = dataclasses.MISSING, completes: str = "") -> Any:
    """A field that is an argument. metavar, help_text: in the help; default: where it may be left out

    completes: the kind of names that a shell completes"""
    return dataclasses.field(default=default, metadata={"flag": Flag(metavar, help_text, metavar, completes)})


def count(text: str | int) -> int:
    """The number of `64`, `8k` or `8K`. Raises ValueError for what is none."""
    from perfmodel.files.units import parse_count

    try:
        number = int(parse_count(text))
    except ValueError:
        raise ValueError(f"got {str(text)!r}; expected a whole number, as in 64, 8k (8,000) or 8K (8,192)") from None
    if number < 1:
        raise ValueError(f"got {text}; expected a number of at least 1")
    return number


@dataclass(frozen=True)
class CommandRequest:
    """What a command is asked.

    command:  as it is typed, `hardware list`
    examples: one or two lines as anyone would type them
    has_json, has_details: whether it takes `--json`; `--details`, for all of an answer that is brief without
    is_long:  whether it says now and then how far it is where no terminal is watching"""

    command: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    has_json: ClassVar[bool] = True
    has_details: ClassVar[bool] = False
    is_long: ClassVar[bool] = False

    def answer(self, console: Console = QUIET) -> Answer | None:
        """The answer; None of a command that only does something. Raises PerfmodelError for what it cannot do."""
        raise NotImplementedError

    def files(self, answer: Answer) -> dict[str, str]:
        """What an answer can be taken along as: file name -> text."""
        return {}

    @classmethod
    def flags_of(cls) -> dict[str, Flag]:
        """Field -> its flag, in the order of the fields."""
        return {field.name: field.metadata["flag"] for field in dataclasses.fields(cls) if "flag" in field.metadata}

    @property
    def arguments(self) -> list[str]:
        """What follows `perfmodel` on the command line: arguments, flags that are not at their defaults, and what
        `--set` says at the end.

        Of an argument elsewhere the last two parts are shown, of a file to be written there its name."""
        words = [(-1, word) for word in self.command.split()]
        words += [(1, word) for name, value in self.scenario_words() for word in (f"--{name}", value)]
        for field in dataclasses.fields(self):
            value, form = getattr(self, field.name), field.metadata.get("flag")
            if form is not None and form.is_in_line and value != field.default:
                place = 0 if form.is_argument else _AT_END.get(field.name, 2)
                for one in value if isinstance(value, tuple) else (value,):
                    words += [(place, word) for word in _words(form, one)]
        return [word for _, word in sorted(words, key=lambda pair: pair[0])]

    def scenario_words(self) -> Sequence[tuple[str, str]]:
        """(name, value) of flags that stand for a scenario."""
        return ()

    @property
    def line(self) -> str:
        """The command that gives the same answer."""
        return shlex.join(["perfmodel", *self.arguments])


_AT_END = {"overrides": 3, "report": 4}


def _words(form: Flag, value: Any) -> Iterator[str]:
    """A value on the command line; nothing where it was not given."""
    if value is None or value is False or value == "":
        return
    if form.is_argument:
        text = str(value)
        yield "/".join(Path(text).parts[-2:]) if text.startswith(("/", "../")) else text
        return
    yield form.name
    if isinstance(value, Path):
        yield value.name if value.is_absolute() else value.as_posix()
    elif value is not True:
        yield f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- the scenario of a request

TRAFFIC = "chat"  # where nothing else is asked for
MAX_KINDS = 20  # of devices
_MIN_BARE_MS = 5  # below, whoever leaves the unit out may well mean seconds
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
# Limits on single requests, `--ttft`, and on a statistic of all of them, `--ttft-p99`, with the fields of an SLO.
LIMITS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2el_ms"}
LIMITS |= {f"{name}-{statistic}": f"{name}_{statistic}_ms" for name in (*LIMITS, "itl") for statistic in _STATISTICS}
# Each flag, and the field of a scenario that it stands for.
FLAG_FIELDS: Mapping[str, str] = {
    **{"model": "model", "hardware": "hardware", "rate": "traffic.arrivals.rate", "traffic": "traffic"},
    **{name: f"slo.{field}" for name, field in LIMITS.items()},
}
# Those that count for what lies in memory, for a step, and for a run.
MEMORY_FLAGS = ("model", "hardware")
STEP_FLAGS = (*MEMORY_FLAGS, "rate", "traffic")
RUN_FLAGS = (*MEMORY_FLAGS, "rate", *LIMITS, "traffic")


def _limit_flag(name: str, help_text: str, also: str = "") -> Flag:
    """A limit on single requests; its help names the limits on statistics, which have no lines of their own."""
    more = ", ".join(flag.removeprefix(name) for flag in LIMITS if flag.startswith(f"{name}-"))
    text = f"{help_text}: 90 % of requests (plan.attainment) are to meet it. --{name}{more} limit that statistic.{also}"
    return Flag(f"--{name}", text, "TIME")


SCENARIO_FLAGS: Mapping[str, Flag] = {
    form.name.removeprefix("--"): dataclasses.replace(form, panel="Without a scenario file")
    for form in (
        Flag("--model", "A model's name (`perfmodel models list`), or a path to a config.json.", "MODEL", "models"),
        Flag(
            *("--hardware", "A device (`perfmodel hardware list`); plans choose between several: h100,h200."),
            *("DEVICE", "hardware"),
        ),
        Flag("--rate", "Requests per second, or as in 300/min; else the traffic's own.", "RATE"),
        _limit_flag("ttft", "Limit until a request's first token, as in 1s or 500ms (a number is ms)"),
        _limit_flag(
            *("tpot", "Limit between its tokens after the first, as in 40ms"),
            " --itl-mean, ... limit that of all gaps between tokens.",
        ),
        _limit_flag("e2e", "Limit until its last token, as in 20s"),
        *(
            Flag(f"--{name}", "Limit on this statistic of all requests.", "TIME", is_hidden=True)
            for name in LIMITS
            if "-" in name
        ),
        Flag("--traffic", "chat (by default), code, summaries, long-chat ..., or a traffic file.", "NAME", "traffic"),
    )
}


@dataclass(frozen=True)
class FlagsRequest(CommandRequest):
    """A request about a scenario that flags stand for. flags: (name, value) of those that are given

    scenario_flags: names of those that the command takes
    short_forms:    of its overrides, `--tp 4`"""

    scenario_flags: ClassVar[tuple[str, ...]] = RUN_FLAGS
    short_forms: ClassVar[tuple[str, ...]] = ()

    flags: tuple[tuple[str, str], ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def given(self) -> dict[str, str]:
        """The flags that are given, by their names."""
        return dict(self.flags)

    def scenario_words(self) -> Sequence[tuple[str, str]]:
        return self.flags


@dataclass(frozen=True)
class ScenarioRequest(FlagsRequest):
    """A request about a scenario: a name or a path, or flags. overrides: as `--set` takes them"""

    scenario: str | None = argument(
        "SCENARIO",
        "A scenario's name, a path to its file, or - for stdin; or none, and --model and --hardware.",
        None,
        "scenarios",
    )
    overrides: tuple[str, ...] = flag("--set", OVERRIDES_HELP, (), "KEY=VALUE")

    def load(self, seed: int | None = None) -> "Scenario":
        """The scenario, with `--set` and `--seed` applied. Raises SpecError as `source` and `load_scenario` do."""
        return load(self.source(), self.overrides, seed)

    def source(self, num_devices: int = 1) -> str:
        """What names the scenario: a name or a path, or the text of what the flags mean.

        num_devices: kinds of devices that the command takes

        Raises SpecError for a file beside flags, for neither, and for flags without a model or a device."""
        from perfmodel.specs.scenario_source import as_text, given_source

        if self.scenario is None:
            places = {FLAG_FIELDS[name]: f"--{name} {value}" for name, value in self.flags}  # for errors to name
            return as_text(scenario_of_flags(self.given, num_devices), places)
        for name, value in self.flags:
            raise SpecError(
                f"{self.scenario} beside --{name} {value}: the flags stand for a scenario without a file; change one "
                f"with --set, or leave it out."
            )
        return given_source(self.scenario)

    def assumed(self, scenario: "Scenario", chosen: Set[str] = frozenset()) -> tuple[str, ...]:
        """A note on what flags and `--set` have left open; none where a file says it all.

        chosen: fields that the answer itself chooses"""
        if self.scenario is not None:
            return ()
        named = {text.partition("=")[0].strip() for text in self.overrides} | chosen
        traffic, engine, absent = scenario.traffic, scenario.engine, set(self.scenario_flags) - set(self.given)
        lengths, assumed = {"traffic.input_tokens", "traffic.output_tokens"}, []
        if "traffic" in absent and "traffic" not in named and not lengths <= named:
            assumed.append(f"traffic {traffic.name} ({traffic.source})")
        if "rate" in absent and traffic.arrivals.rate and not named & {"traffic.arrivals.rate", "traffic.arrivals"}:
            assumed.append(f"{traffic.arrivals.rate:g} requests/s, the rate of {traffic.name or 'the traffic'}")
        if "ttft" in self.scenario_flags and not scenario.slo.is_given:
            assumed.append("no limits on latency")
        if not named & {"engine", "engine.profile", "engine.version"}:
            assumed.append(f"{engine.described.label} with its defaults")
        if scenario.plan is None and not named & {"engine", "engine.tensor_parallel_size"}:
            assumed.append(f"tensor_parallel_size {engine.tensor_parallel_size}")
        return (f"Assumed: {'; '.join(assumed)}. Change any of it with --set.",) if assumed else ()


def load(scenario: str, overrides: Sequence[str] = (), seed: int | None = None) -> "Scenario":
    """The scenario, of stdin for `-`, with `--set` and `--seed` applied."""
    from perfmodel.specs import load_scenario
    from perfmodel.specs.scenario_source import given_source

    return load_scenario(given_source(scenario), [*overrides, *([] if seed is None else [f"seed={seed}"])])


def scenario_of_flags(given: Mapping[str, str], num_devices: int = MAX_KINDS) -> dict[str, Any]:
    """The mapping of the scenario file that flags stand for. Raises SpecError as `ScenarioRequest.source` does."""
    missing = next((name for name in ("model", "hardware") if name not in given), None)
    if missing is not None:
        what = "no scenario" if not given else f"--{next(iter(given))} without --{missing}"
        raise SpecError(
            f"{what}: give a scenario (`perfmodel scenarios list`), or --model and --hardware, as in --model "
            f"llama-3.1-8b --hardware h100."
        )
    devices = tuple(name.strip() for name in given["hardware"].split(",") if name.strip())
    if not 1 <= len(devices) <= num_devices:
        raise SpecError(
            f"--hardware {given['hardware']}: got {len(devices)} devices; expected {num_devices}; `perfmodel "
            f"plan` chooses between several."
        )
    from perfmodel.files.yaml_loader import parse_value
    from perfmodel.specs.shorthand import Shorthand

    slo = tuple((field, _limit(name, given[name])) for name, field in LIMITS.items() if name in given)
    rate = parse_value(given["rate"], "--rate") if "rate" in given else None
    return Shorthand(given["model"], devices, given.get("traffic", TRAFFIC), rate, slo).to_data()


def _limit(name: str, text: str) -> Any:
    """A limit as it was given. Raises SpecError for a small number without a unit: seconds or milliseconds?"""
    from perfmodel.files.yaml_loader import parse_value

    value = parse_value(text, f"--{name}")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MIN_BARE_MS:
        raise SpecError(f"--{name} {text}: got a number without a unit; write {value:g}s or {value:g}ms.")
    return value


# ---------------------------------------------------------------- `--tp 4`, `--input 2k`: short forms of overrides


class ShortForm(NamedTuple):
    """A flag that stands for one `--set`.

    field:   of a scenario; kind: of its values
    value:   as `--set` takes it, with a place for the flag's own
    in_plan: whether plans search over the field: there the flag is the only value to try"""

    field: str
    flag: Flag
    kind: type
    value: str = "{}"
    in_plan: bool = True

    def override(self, value: int | bool | str, is_plan: bool = False) -> str:
        """`engine.tensor_parallel_size=4`, in a plan `plan.space.tensor_parallel_size=[4]`."""
        text = self.value.format(str(value).lower())
        if is_plan and self.in_plan:
            return f"plan.space.{self.field.rpartition('.')[2]}=[{text}]"
        return f"{self.field}={text}"


def _size(name: str, what: str, field: str) -> ShortForm:
    return ShortForm(field, Flag(f"--{name}", f"{what}, as {field}.", "N", is_count=True), int)


def _length(name: str, what: str) -> ShortForm:
    help_text = f"{what} of this many tokens, all alike; 2k is 2,000, 2K is 2,048."
    fixed, field = "{{distribution: fixed, value: {}}}", f"traffic.{name}_tokens"
    return ShortForm(field, Flag(f"--{name}", help_text, "N", is_count=True), int, fixed, False)


_EXPERTS, _PRICE = "engine.enable_expert_parallel", "Of a device hour: 2.10, or of each device: h100=2.10,h200=3."
SHORT_FORMS: Mapping[str, ShortForm] = {
    "tp": _size("tp", "Devices that every matrix is split over", "engine.tensor_parallel_size"),
    "pp": _size("pp", "Stages of layers", "engine.pipeline_parallel_size"),
    "dp": _size("dp", "Data-parallel ranks of a replica", "engine.data_parallel_size"),
    "ep": ShortForm(_EXPERTS, Flag("--ep", f"Whole experts on the ranks, as {_EXPERTS}."), bool),
    "input": _length("input", "Prompts"),
    "output": _length("output", "Answers"),
    "price": ShortForm("price.usd_per_gpu_hour", Flag("--price", _PRICE, "USD"), str, in_plan=False),
}
PARALLELISM = ("tp", "pp", "dp", "ep")
STEP_FORMS = (*PARALLELISM, "input", "output")  # of commands without costs
_SIZES = ("tp", "pp", "dp")  # their product is the number of devices


def short_overrides(
    given: Mapping[str, Any], overrides: Sequence[str] = (), hardware: str | None = None, is_plan: bool = False
) -> tuple[str, ...]:
    """`overrides`, and those that the short forms given stand for.

    given:    name -> its value, as the command line has it
    hardware: the flag of that name, "" without it; None: the command has no such flag
    is_plan:  what is given is the only value that the plan tries

    Raises SpecError for a field that a flag and `--set` both give, for sizes with another product than the number of
    devices in `--hardware 8xh100`, and for prices of devices that `--hardware` does not name."""
    if "price" in given:
        given = {**given, "price": _prices(given["price"], hardware or "")}
    for name, value in given.items():
        form = SHORT_FORMS[name]
        places = (form.field, form.override(value, is_plan).partition("=")[0])
        for text in overrides:
            if any(_gives(text, place) for place in places):
                raise SpecError(f"--{name} {value} beside --set {text}: both give {form.field}; leave one out.")
    chosen = {**given, **({} if is_plan or hardware is None else _rest_of_server(given, hardware))}
    return (*overrides, *(SHORT_FORMS[name].override(value, is_plan) for name, value in chosen.items()))


def _gives(text: str, place: str) -> bool:
    """Whether the override `text` is of the field `place`, of something in it, or of a block that has it."""
    from perfmodel.specs.overrides import parse_override

    override, path = parse_override(text), tuple(place.split("."))
    num_shared = min(len(override.path), len(path))
    value = override.value
    for key in path[num_shared:]:
        value = value.get(key) if isinstance(value, dict) else None
    return override.path[:num_shared] == path[:num_shared] and (value is not None or len(override.path) >= len(path))


def _prices(text: str, hardware: str) -> str:
    """`h100=2,h200=3` as a mapping; a number as it is."""
    if "=" not in text:
        return text
    from perfmodel.files.device_tables import named
    from perfmodel.specs.devices import counted_device

    def own_name(device: str) -> str:
        entry = named(device)
        return device.strip() if entry is None else entry.name

    pairs = [pair.partition("=") for pair in text.split(",")]
    devices = [counted_device(part)[1] for part in hardware.split(",") if part.strip()]
    for name, _, usd in pairs:
        if not usd.strip() or not name.strip():
            missing = f"{name!r} has no price" if name.strip() else f"no device has the price {usd!r}"
            raise SpecError(f"--price {text}: {missing}; write h100=2.10,h200=3.")
        if devices and own_name(name) not in map(own_name, devices):
            raise SpecError(f"--price {text}: --hardware names no {name.strip()}, but {', '.join(devices)}.")
        if not devices and named(name) is None:
            raise SpecError(f"--price {text}: no device is called {name.strip()}; see `perfmodel hardware list`.")
    return "{" + ", ".join(f"{name.strip()}: {usd.strip()}" for name, _, usd in pairs) + "}"


def _rest_of_server(given: Mapping[str, Any], hardware: str) -> dict[str, int]:
    """What `tp` is where `--hardware 8xh100` gives the number of devices and other sizes are given."""
    from perfmodel.specs.devices import counted_device

    num_devices, device = counted_device(hardware)
    sizes = {name: int(given[name]) for name in _SIZES if name in given}
    if num_devices is None or not sizes:
        return {}
    rest, remainder = divmod(num_devices, prod(sizes.values()))
    if remainder or rest < 1 or ("tp" in sizes and rest != 1):
        shown = " ".join(f"--{name} {size}" for name, size in sizes.items())
        raise SpecError(
            f"--hardware {num_devices}x{device} with {shown}: got {prod(sizes.values())} devices of {num_devices}; the "
            f"product of --tp, --pp and --dp is the number of devices."
        )
    return {} if "tp" in sizes else {"tp": rest}
