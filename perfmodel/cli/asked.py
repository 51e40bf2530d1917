"""A scenario asked for by flags: `--model llama-3.1-70b --hardware h100,h200 --rate 20 --ttft 1s --tpot 40ms`.

What the flags leave open is assumed, and said on stderr, which `--json` leaves free.
"""

__all__ = [
    "MOST_KINDS",
    "E2eFlag",
    "HardwareFlag",
    "ModelFlag",
    "RateFlag",
    "TpotFlag",
    "TrafficFlag",
    "TtftFlag",
    "asked_data",
    "asked_scenario",
    "say_assumed",
]

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfmodel.cli import completion
from perfmodel.cli.options import Given
from perfmodel.cli.terminal import say
from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.specs.scenario import Scenario

_TRAFFIC = "chat"
MOST_KINDS = 20  # of devices
_PANEL = "Without a scenario file"

ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="A model's name (`perfmodel models list`), or a path to a config.json.",
        autocompletion=completion.models,
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
HardwareFlag = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="DEVICE",
        help="A device (`perfmodel hardware list`); plans choose between several: h100,h200.",
        autocompletion=completion.devices,
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
RateFlag = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="RATE",
        help="Requests per second, or as in 300/min; else the traffic's own.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
TtftFlag = Annotated[
    str | None,
    typer.Option(
        "--ttft",
        metavar="TIME",
        help="Limit until the first token, as in 1s or 500ms; a number is ms.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
TpotFlag = Annotated[
    str | None,
    typer.Option(
        "--tpot",
        metavar="TIME",
        help="Limit between tokens after the first, as in 40ms.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
E2eFlag = Annotated[
    str | None,
    typer.Option(
        "--e2e",
        metavar="TIME",
        help="Limit until the last token, as in 20s.",
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]
TrafficFlag = Annotated[
    str | None,
    typer.Option(
        "--traffic",
        metavar="NAME",
        help="chat (by default), code, summaries, long-chat ..., or a traffic file.",
        autocompletion=completion.traffic,
        show_default=False,
        rich_help_panel=_PANEL,
    ),
]


def asked_scenario(scenario: str | None, flags: dict[str, Given], num_devices: int = 1) -> str:
    """What names the scenario: a name or a path, or the text of what the flags say.

    flags:       by their names: model, hardware, rate, ttft, tpot, e2e, traffic
    num_devices: kinds of devices that the command takes

    Raises SpecError for a file beside flags, for neither, and for flags without a model or a device.
    """
    given = {name: str(value) for name, value in flags.items() if value is not None}
    if scenario is not None:
        if given:
            name = next(iter(given))
            raise SpecError(
                f"{scenario} beside --{name} {given[name]}: the flags stand for a scenario without a file; change one "
                f"with --set, or leave it out."
            )
        return scenario
    from perfmodel.specs.scenario_source import as_text

    return as_text(asked_data(flags, num_devices))


def asked_data(flags: dict[str, Given], num_devices: int = MOST_KINDS) -> dict[str, Any]:
    """The mapping of the scenario file that flags stand for. See `asked_scenario`."""
    given = {name: str(value) for name, value in flags.items() if value is not None}
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
            f"--hardware {given['hardware']}: found {len(devices)} devices, allowed {num_devices}; `perfmodel plan` "
            f"chooses between several."
        )
    from perfmodel.files.yaml_loader import parse_value
    from perfmodel.specs.shorthand import Shorthand

    limits = {"ttft_ms": "ttft", "tpot_ms": "tpot", "e2el_ms": "e2e"}
    slo = tuple((field, parse_value(given[flag], f"--{flag}")) for field, flag in limits.items() if flag in given)
    rate = parse_value(given["rate"], "--rate") if "rate" in given else None
    traffic = given.get("traffic", _TRAFFIC)
    return Shorthand(given["model"], devices, traffic, rate, slo).to_data()


def say_assumed(scenario: "Scenario", flags: dict[str, Given]) -> None:
    """Name on stderr what the flags have left open; nothing where a file says it all."""
    if flags.get("model") is not None:
        say(f"assumed: {'; '.join(_assumed(scenario, flags))}. Change any of it with --set.")


def _assumed(scenario: "Scenario", flags: dict[str, Given]) -> Iterator[str]:
    """What stands in for each flag that the command has and that is not given."""
    traffic, engine = scenario.traffic, scenario.engine
    absent = [name for name, value in flags.items() if value is None]
    if "traffic" in absent:
        yield f"traffic {traffic.name} ({traffic.source})"
    if "rate" in absent and traffic.arrivals.rate:
        yield f"{traffic.arrivals.rate:g} requests/s, the traffic's own rate"
    if "rate" in flags and not scenario.slo.is_given:
        yield "no limits on latency"
    yield f"{engine.described.label} with its defaults"
    if scenario.plan is None:
        yield f"tensor_parallel_size {engine.tensor_parallel_size}"
