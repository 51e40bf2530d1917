"""The flags that stand for a scenario without a file, each written once, and the commands that take them.

`@takes_flags()` gives a command that asks for `asked: Asked` the argument SCENARIO and the flags in its place.
`@takes_short_forms()` gives a command that asks for `overrides` the short forms of its most frequent ones: `--tp 4`.
"""

__all__ = ["FLAGS", "takes_flags", "takes_short_forms"]

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from perfmodel.answers.asked import LIMITS, Asked
from perfmodel.answers.short_forms import SHORT_FORMS, short_overrides
from perfmodel.cli import completion
from perfmodel.cli.options import ScenarioOrFlags, count

_PANEL = "Without a scenario file"


def _flag(name: str, metavar: str, help_text: str, panel: str | None = _PANEL, **more: Any) -> Any:
    """A flag with a text. more: as `typer.Option` takes it"""
    option = typer.Option(
        f"--{name}", metavar=metavar, help=help_text, show_default=False, rich_help_panel=panel, **more
    )
    return Annotated[str | None, option]


def _limit(name: str, help_text: str, also: str = "") -> Any:
    """A limit on single requests; its help names the limits on statistics, which have no lines of their own."""
    more = ", ".join(flag.removeprefix(name) for flag in LIMITS if flag.startswith(f"{name}-"))
    return _flag(
        name,
        "TIME",
        f"{help_text}: 90 % of requests (plan.attainment) are to meet it. --{name}{more} limit that statistic.{also}",
    )


FLAGS: dict[str, Any] = {
    "model": _flag(
        "model",
        "MODEL",
        "A model's name (`perfmodel models list`), or a path to a config.json.",
        autocompletion=completion.models,
    ),
    "hardware": _flag(
        "hardware",
        "DEVICE",
        "A device (`perfmodel hardware list`); plans choose between several: h100,h200.",
        autocompletion=completion.devices,
    ),
    "rate": _flag("rate", "RATE", "Requests per second, or as in 300/min; else the traffic's own."),
    "ttft": _limit("ttft", "Limit until a request's first token, as in 1s or 500ms (a number is ms)"),
    "tpot": _limit(
        "tpot",
        "Limit between its tokens after the first, as in 40ms",
        " --itl-mean, ... limit that of all gaps between tokens.",
    ),
    "e2e": _limit("e2e", "Limit until its last token, as in 20s"),
    **{
        name: _flag(name, "TIME", "Limit on this statistic of all requests.", hidden=True)
        for name in LIMITS
        if "-" in name
    },
    "traffic": _flag(
        "traffic",
        "NAME",
        "chat (by default), code, summaries, long-chat ..., or a traffic file.",
        autocompletion=completion.traffic,
    ),
}


def _count(name: str, help_text: str) -> Any:
    return Annotated[
        int | None, typer.Option(f"--{name}", parser=count, metavar="N", help=help_text, show_default=False)
    ]


_SHORT_OPTIONS: dict[str, Any] = {
    "tp": _count("tp", f"Devices that every matrix is split over, as {SHORT_FORMS['tp'].field}."),
    "pp": _count("pp", f"Stages of layers, as {SHORT_FORMS['pp'].field}."),
    "dp": _count("dp", f"Data-parallel ranks of a replica, as {SHORT_FORMS['dp'].field}."),
    "ep": Annotated[
        bool | None, typer.Option("--ep", help=f"Whole experts on the ranks, as {SHORT_FORMS['ep'].field}.")
    ],
    "input": _count("input", "Prompts of this many tokens, all alike; 2k is 2,000, 2K is 2,048."),
    "output": _count("output", "Answers of this many tokens, all alike; 2k is 2,000, 2K is 2,048."),
    "price": _flag("price", "USD", "Of a device hour: 2.10, or of each device: h100=2.10,h200=3.", panel=None),
}


def takes_short_forms(*names: str, is_plan: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's `overrides` begin with those of short forms: of `names`, or all.

    is_plan: what is given is the only value that the plan tries
    """
    chosen = {name: _SHORT_OPTIONS[name] for name in names or _SHORT_OPTIONS}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*args: Any, **given: Any) -> None:
            values = {name: given.pop(name, None) for name in chosen}
            short = {name: value for name, value in values.items() if value is not None}
            if short:
                given["overrides"] = short_overrides(short, given.get("overrides"), given.get("asked"), is_plan)
            command(*args, **given)

        own = inspect.signature(command)
        parameters = [*own.parameters.values(), *_optional(chosen)]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
        run.__annotations__ = {**command.__annotations__, **chosen}
        return run

    return decorate


def takes_flags(*names: str, has_file: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command's parameter `asked` becomes SCENARIO, if it `has_file`, and flags at the end: of `names`, or all."""
    chosen = {name: FLAGS[name] for name in names or FLAGS}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(scenario: str | None = None, **given: Any) -> None:
            flags = {name: given.pop(_parameter(name)) for name in chosen}
            command(asked=Asked(scenario, flags), **given)

        own = inspect.signature(command)
        first = {"scenario": ScenarioOrFlags} if has_file else {}
        rest = [parameter for parameter in own.parameters.values() if parameter.name != "asked"]
        options = {_parameter(name): option for name, option in chosen.items()}
        parameters = [*_optional(first), *rest, *_optional(options)]
        run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # what typer reads
        kept = {name: kind for name, kind in command.__annotations__.items() if name != "asked"}
        run.__annotations__ = {**first, **kept, **options}
        return run

    return decorate


def _parameter(flag: str) -> str:
    return flag.replace("-", "_")


def _optional(parameters: dict[str, Any]) -> list[inspect.Parameter]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [inspect.Parameter(name, kind, default=None, annotation=each) for name, each in parameters.items()]
