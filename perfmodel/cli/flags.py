"""The flags that stand for a scenario without a file, each written once, and the commands that take them.

`@takes_flags()` gives a command that asks for `asked: Asked` the argument SCENARIO and the flags in its place.
"""

__all__ = ["FLAGS", "takes_flags"]

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from perfmodel.answers.asked import LIMITS, Asked
from perfmodel.cli import completion
from perfmodel.cli.options import ScenarioOrFlags

_PANEL = "Without a scenario file"


def _flag(
    name: str, metavar: str, told: str, complete: Callable[..., Any] | None = None, is_hidden: bool = False
) -> Any:
    option = typer.Option(
        f"--{name}",
        metavar=metavar,
        help=told,
        autocompletion=complete,
        show_default=False,
        rich_help_panel=_PANEL,
        hidden=is_hidden,
    )
    return Annotated[str | None, option]


def _limit(name: str, told: str, also: str = "") -> Any:
    """A limit on single requests; its help names the limits on statistics, which have no lines of their own."""
    more = ", ".join(flag.removeprefix(name) for flag in LIMITS if flag.startswith(f"{name}-"))
    return _flag(
        name,
        "TIME",
        f"{told}: 90 % of requests (plan.attainment) are to meet it. --{name}{more} limit that statistic.{also}",
    )


FLAGS: dict[str, Any] = {
    "model": _flag(
        "model", "MODEL", "A model's name (`perfmodel models list`), or a path to a config.json.", completion.models
    ),
    "hardware": _flag(
        "hardware",
        "DEVICE",
        "A device (`perfmodel hardware list`); plans choose between several: h100,h200.",
        completion.devices,
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
        name: _flag(name, "TIME", "Limit on this statistic of all requests.", is_hidden=True)
        for name in LIMITS
        if "-" in name
    },
    "traffic": _flag(
        "traffic",
        "NAME",
        "chat (by default), code, summaries, long-chat ..., or a traffic file.",
        completion.traffic,
    ),
}


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
        rest = [each for each in own.parameters.values() if each.name != "asked"]
        options = {_parameter(name): each for name, each in chosen.items()}
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
