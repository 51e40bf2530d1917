"""What comes along, listed and one by one: `hardware`, `models`, `scenarios`, `techniques`; files to begin with: `new`,
`schema`."""

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.commands import request as req
from perfmodel.commands.request import QUIET, Answer, CommandRequest, Console, argument, flag, scenario_of_flags, view
from perfmodel.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perfmodel.report.document import Document
    from perfmodel.specs.commands.line import LineScenario
    from perfmodel.specs.hardware import HardwareSpec

_MAX_BYTES = 1_000_000  # of a file with a command line
_SUFFIXES = (".sh", ".yaml", ".yml", ".txt", ".env")


# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class HardwareListRequest(CommandRequest):
    """List the devices with memory, bandwidth, peak and ridge point, and the networks between nodes.

    Without a filter, siblings are shown as the tables that they are in; with one, each device by itself."""

    command = "hardware list"
    examples = ("hardware list",)

    kind: str | None = flag("--kind", "Only these: gpu, cpu, tpu, npu.")
    maker: str | None = flag("--maker", "Only this maker's: nvidia, amd, intel ...")
    name: str | None = flag("--name", "Only those with this in their name: rtx-40.")

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request. Raises SpecError where no device passes the filters."""
        from perfmodel.report.views.catalog import device_facts

        given = {"--kind": self.kind, "--maker": self.maker, "--name": self.name}
        filters = [f"{name} {value}" for name, value in given.items() if value is not None]
        if not filters:
            return Answer(lambda: [device_facts(device) for device in _devices()], _siblings)
        chosen = [
            device
            for device in _devices(self.name or "")
            if self.kind in (None, device.kind) and self.maker in (None, device.maker)
        ]
        if not chosen:
            kinds, makers = (sorted({str(getattr(one, field)) for one in _devices()}) for field in ("kind", "maker"))
            known = f"kinds are {', '.join(kinds)}; makers {', '.join(makers)}"
            raise SpecError(f"no device is listed for {' '.join(filters)}; {known}.")
        return Answer(lambda: [device_facts(device) for device in chosen], view("catalog:devices_view", chosen), chosen)


def _siblings() -> "Document":
    from perfmodel import specs
    from perfmodel.report.views.catalog import siblings_view

    devices = [specs.load_hardware(name) for name in specs.list_names("hardware")]
    networks = [specs.load_network(name) for name in specs.list_networks()]
    return siblings_view(devices, specs.load_tables(), networks)


def _devices(part: str = "") -> "list[HardwareSpec]":
    """All that are known by a name with `part` in it."""
    from perfmodel import specs

    return [specs.load_hardware(name) for name in specs.list_hardware() if part in name]


@dataclass(frozen=True)
class HardwareShowRequest(CommandRequest):
    """Show everything declared of one device, or of a network between nodes, and where it comes from."""

    command = "hardware show"
    examples = ("hardware show h100",)

    name: str = argument("NAME", "A device's name, alias or file.", completes="hardware")

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is its specification. Raises SpecError for what is neither's name nor file."""
        from perfmodel import specs
        from perfmodel.files.sandbox import is_allowed

        if is_allowed(self.name) and Path(self.name).is_file():
            is_network = "declared" not in specs.load_yaml(self.name).data
        else:
            is_network = specs.find_network(self.name) is not None
        # What is neither's is for the device's reader to say.
        spec = specs.load_network(self.name) if is_network else specs.load_hardware(self.name)
        place = "catalog:network_view" if is_network else "catalog:device_view"
        return Answer(lambda: spec.model_dump(mode="json"), view(place, spec), spec)


@dataclass(frozen=True)
class HardwareNewRequest(CommandRequest):
    """Print the file of a device that is not known yet, every field explained, to be filled in.

    Write it to a file, replace the figures, and use it by its path:
    `perfmodel hardware new my-npu --like a100-sxm-80gb > my-npu.yaml`, then
    `perfmodel simulate llama-3.1-8b-a100 --set hardware=./my-npu.yaml`."""

    command = "hardware new"
    examples = ("hardware new my-npu --like a100-sxm-80gb",)
    has_json = False

    name: str = argument("NAME", "What the device is to be called.")
    like: str = flag(
        "--like", "The known device whose figures are filled in.", "h100-sxm-80gb", "DEVICE", shows_default=True
    )

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel import specs
        from perfmodel.specs.hardware_template import hardware_template

        return Answer(text=hardware_template(self.name, specs.load_hardware(self.like)))


@dataclass(frozen=True)
class HardwareDetectRequest(CommandRequest):
    """Print the file of the machine at hand as a start: its first GPU, else its processor.

    GPUs are asked for by their makers' tools where they are installed (nvidia-smi, amd-smi, rocm-smi, xpu-smi,
    system_profiler); the memory's bandwidth is measured by copying for two seconds on all cores."""

    command = "hardware detect"
    examples = ("hardware detect", "hardware detect --cpu --seconds 5")
    has_json = False

    cpu: bool = flag("--cpu", "The processor's file, also where there is a GPU.", False)
    seconds: float = flag(
        "--seconds", "How long the copy test of the memory takes.", 2.0, low=0.1, high=60, shows_default=True
    )

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel.specs.detect import graphics_file, processor_file, summary, this_machine

        machine = this_machine(self.seconds)
        file = processor_file(machine) if self.cpu or not machine.graphics else graphics_file(machine.graphics[0])
        return Answer(text=summary(machine) + file)


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class PricesRequest(CommandRequest):
    """List what an hour of each device costs: kind, date, age and source; with --stale, what should be asked again."""

    command = "prices"
    examples = ("prices", "prices --stale")

    is_stale: bool = flag("--stale", "Only those more than half a year old, or unconfirmed.", False)

    def answer(self, console: Console = QUIET) -> Answer:
        """Raises SpecError where SOURCE_DATE_EPOCH is no date."""
        from perfmodel.dates import today
        from perfmodel.specs.hardware import listed_prices
        from perfmodel.specs.scenario import is_stale

        facts = [
            {
                **{"device": device, "usd_per_hour": price.usd_per_hour, "kind": price.kind, "source": price.source},
                "date": None if price.date is None else price.date.isoformat(),
                "age_days": None if price.date is None else (today() - price.date).days,
                **{"is_stale": is_stale(price), "is_unconfirmed": price.is_unconfirmed},
            }
            for device, price in listed_prices().items()
        ]
        facts = [fact for fact in facts if not self.is_stale or fact["is_stale"] or fact["is_unconfirmed"]]
        return Answer(lambda: facts, view("catalog:prices_view", facts))


@dataclass(frozen=True)
class ModelsListRequest(CommandRequest):
    """List the models with their sizes."""

    command = "models list"
    examples = ("models list",)

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel import specs
        from perfmodel.report.views.catalog import model_facts

        facts = [model_facts(specs.load_model(name)) for name in specs.list_models()]
        return Answer(lambda: facts, view("catalog:models_view", facts))


@dataclass(frozen=True)
class ModelsShowRequest(CommandRequest):
    """Show a model's layers, parameters by component, and bytes."""

    command = "models show"
    examples = ("models show llama-3.1-8b",)

    name: str = argument("NAME", "A model's name or alias, or a path to a config.json.", completes="models")

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result`: the ModelSpec. Raises SpecError for a model of no card, file or Hub repository."""
        from perfmodel import specs
        from perfmodel.report.views.catalog import model_facts

        model = specs.load_model(self.name, ask_hub=True)

        layers = [{"count": number, **_layer(layer)} for layer, number in model.layers]
        facts = {**model_facts(model), "layers": layers, "quantization": asdict(model.quantization)}
        return Answer(lambda: {**facts, "source": model.source}, view("catalog:model_view", model), model)


def _layer(layer: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name, part in (("mixer", layer.mixer), ("ffn", layer.ffn)):
        parts[name] = None if part is None else {"kind": type(part).__name__, **asdict(part)}
        if hasattr(part, "rope"):
            parts[name]["use_rope"] = part.rope is not None
    return parts


# ---------------------------------------------------------------- scenarios


@dataclass(frozen=True)
class ScenariosListRequest(CommandRequest):
    """List the scenarios, and the traffic that `--traffic` names, with what each is."""

    command = "scenarios list"
    examples = ("scenarios list --all",)

    every: bool = flag("--all", "Also those of studies, techniques and publications.", False)

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel.specs.scenario_source import scenario_files, traffic_files

        scenarios, traffic = scenario_files(self.every), traffic_files()
        data = {"scenarios": scenarios, "traffic": traffic}
        return Answer(lambda: data, view("catalog:scenarios_view", scenarios, traffic))


@dataclass(frozen=True)
class ScenariosShowRequest(CommandRequest):
    """Print a scenario's file, to be copied and changed; with --json, all its fields as resolved."""

    command = "scenarios show"
    examples = ("scenarios show llama-3.1-8b-a100",)

    name: str = argument("NAME", "A scenario's name, or a path to its file.", completes="scenarios")

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel import specs
        from perfmodel.cost.calibrations.provenance import resolved

        fields = resolved(specs.load_scenario(self.name))
        return Answer(lambda: fields, text=specs.find_file("scenarios", self.name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class ScenariosNewRequest(req.FlagsRequest):
    """Print the scenario file that these flags stand for in other commands."""

    command = "scenarios new"
    examples = ("scenarios new --model llama-3.1-8b --hardware h100 --rate 20 --traffic code",)
    has_json = False

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request. Raises SpecError without a model and a device."""
        from perfmodel.files.yaml_loader import dump_yaml

        if not {"model", "hardware"} & set(self.given):
            raise SpecError("no model: give --model and --hardware, as in --model llama-3.1-8b --hardware h100.")
        return Answer(text=dump_yaml(scenario_of_flags(self.given)))


@dataclass(frozen=True)
class NewRequest(req.FlagsRequest):
    """Print the scenario that a command line stands for: `vllm serve ...`, `sglang serve ...`, `trtllm-serve ...`,
    `llama-server ...`, `ollama run ...`, with its load test. It is read, never executed."""

    command = "new"
    examples = (
        "new 'vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 4 --kv-cache-dtype fp8' --hardware h100 --rate 20",
        "new serve.sh --hardware h200 --strict",
    )
    has_json = False

    line_or_file: str = argument(
        "LINE", "A command line in quotes, a file that holds one (script, compose file, manifest), or - for stdin."
    )
    strict: bool = flag("--strict", "Refuse what affects time and is not modelled; else it is a warning.", False)

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `data` is the file's mapping, `result` the warnings of what takes time but is unmodelled."""
        answer = answer_line(*_read_line(self.line_or_file), self.given, self.strict)
        for warning in answer.result:
            console.say(f"warning: {warning}.")
        return answer


def answer_line(text: str, place: str, folder: Path, given: "Mapping[str, str]", strict: bool = False) -> Answer:
    """What a command line says, completed by flags, and by what is assumed where neither says it.

    text:   a command line, a script, a compose file or a manifest
    place:  what errors call the text
    folder: that files which the line names are in
    given:  flags beside it; strict: what affects time and is not modelled is refused

    Raises SpecError, in one sentence: for unknown flags, for what is missing, for a scenario that cannot be."""
    from perfmodel import specs
    from perfmodel.specs.commands.line import scenario_text
    from perfmodel.specs.scenario_source import as_text

    scenario = _line_scenario(text, place, folder, given)
    warnings = [f"{what}: affects time and is not modelled ({why})" for what, why in scenario.unmodelled]
    if strict and warnings:
        raise SpecError(f"--strict: {warnings[0]}; take it out of the line, or leave out --strict.")
    specs.load_scenario(as_text(scenario.data, scenario.sources))
    return Answer(lambda: scenario.data, result=tuple(warnings), text=scenario_text(scenario))


def _line_scenario(text: str, place: str, folder: Path, given: "Mapping[str, str]") -> "LineScenario":
    from perfmodel.specs.commands.line import Asking, read_line
    from perfmodel.specs.shorthand import name_of, scenario_name

    own: dict[str, Any] = {}
    if {"traffic", *req.LIMITS} & set(given):
        blocks = scenario_of_flags({**given, "model": "-", "hardware": given.get("hardware", "cpu")})
        own = {key: blocks[key] for key in ("traffic", "slo") if key in blocks and (key == "slo" or "traffic" in given)}
    device = name_of("hardware", given["hardware"]) if "hardware" in given else None
    asking = Asking(given.get("model"), device, own, {block: f"--{block}" for block in own}, folder)
    line = read_line(text, asking, place)
    assumed = []
    if "traffic" not in line.data:
        blocks = scenario_of_flags({**given, "model": "-", "hardware": line.data["hardware"]})
        line.data["traffic"] = blocks["traffic"]
        assumed.append(f"traffic {req.TRAFFIC}, as the line has no load test (--traffic, --rate)")
    elif "rate" in given and "traffic" not in given:
        from perfmodel.files.yaml_loader import parse_value

        arrivals = {"process": "poisson", "rate": parse_value(given["rate"], "--rate")}
        line.data["traffic"] = {**line.data["traffic"], "arrivals": arrivals}
    name = scenario_name(line.data["model"], line.data["hardware"])
    return replace(line, data={"name": name, **line.data}, assumed=(*line.assumed, *assumed))


def _read_line(line: str) -> tuple[str, str, Path]:
    """The text, what errors call it, and the folder that its files are in."""
    if line == "-":
        from perfmodel.specs.scenario_source import read_stdin

        return read_stdin(), "stdin", Path()
    from perfmodel.files.catalog import expanded

    path = expanded(line)
    try:
        is_file = "\n" not in line and path.is_file()
    except (OSError, ValueError):
        is_file = False
    if not is_file and len(line.split()) == 1 and path.suffix in _SUFFIXES:
        raise SpecError(f"{line}: no such file; give one, or a command line in quotes.")
    if not is_file:
        return line, "line", Path()
    from perfmodel.files.sandbox import read_limited_text

    try:
        return read_limited_text(path, _MAX_BYTES), path.name, path.parent
    except (OSError, UnicodeError) as error:
        raise SpecError(f"{line}: cannot be read as text: {error}.") from None


# ---------------------------------------------------------------- schemas and techniques


# The kinds of files that users write.
SchemaKind = StrEnum("SchemaKind", ["scenario", "hardware", "family", "model", "traffic", "study"])


@dataclass(frozen=True)
class SchemaRequest(CommandRequest):
    """Print the JSON Schema of a kind of file, for completion and checks in editors."""

    command = "schema"
    examples = ("schema scenario",)
    has_json = False

    kind: SchemaKind = argument("KIND", "Which kind of file.")

    def answer(self, console: Console = QUIET) -> Answer:
        from perfmodel import specs

        return Answer(lambda: specs.schema(self.kind.value))


@dataclass(frozen=True)
class TechniquesRequest(CommandRequest):
    """List every technique: simulated, executed as simulated, and how far from what was published.

    Figures are those of the committed reports: predicted over published in the median, simulated and executed speedup
    of a pair of scenarios. A technique is executed where more than 5 % is, beyond the spread of paired runs, and as
    simulated within 10 %; validated within 25 %; what is farther off is shown as missed, and a pair without an effect
    on a CPU proves nothing."""

    command = "techniques"
    examples = ("techniques --family serving",)

    family: str | None = flag("--family", "Only these, as in serving or decoding.", metavar="NAME")

    def answer(self, console: Console = QUIET) -> Answer:
        """As of a request; `result` is a list of TechniqueStatus. Raises SpecError for a family that is none."""
        from perfmodel.evidence.executed.technique import read_status
        from perfmodel.files.catalog import normal_name

        rows = read_status()
        if self.family is not None:
            known = list(dict.fromkeys(row.family for row in rows))
            rows = [row for row in rows if normal_name(row.family) == normal_name(self.family)]
            if not rows:
                near = did_you_mean(self.family, known)
                raise SpecError(f"--family: got {self.family!r}; expected {', '.join(known)}.{near}")
        return Answer(lambda: [row.to_json() for row in rows], view("catalog:techniques_view", rows), rows)
