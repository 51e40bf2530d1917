"""`perfmodel validate KIND PATH`: predictions beside measurements."""

__all__ = ["Kind", "validate"]

from enum import StrEnum
from typing import Annotated

import typer

from perfmodel.cli.options import JsonFlag, Overrides, Seed, load
from perfmodel.cli.terminal import print_json, progress_bar
from perfmodel.errors import SpecError


class Kind(StrEnum):
    """What predictions can be compared with."""

    operators = "operators"
    serving = "serving"
    steady_state = "steady-state"
    per_request = "per-request"
    executor = "executor"


KindName = Annotated[
    Kind,
    typer.Argument(metavar="KIND", help="What to compare with.", show_default=False),
]
TruthPath = Annotated[
    str,
    typer.Argument(metavar="PATH", help="For `executor`, a scenario; otherwise measured data.", show_default=False),
]
Repeats = Annotated[int, typer.Option("--repeat", min=1, help="Execute this many times.")]


def validate(
    kind: KindName,
    path: TruthPath,
    overrides: Overrides = None,
    repeat: Repeats = 1,
    as_json: JsonFlag = False,
    seed: Seed = None,
) -> None:
    """Put predictions beside measurements and say how far apart they are.

    `executor` calibrates this machine, simulates the scenario, executes it, and compares step by step and request
    by request. Needs the executor extra (torch).
    """
    if kind is not Kind.executor:
        raise SpecError(
            f"validate {kind.value}: comparing with recorded measurements comes with the calibrations fitted to them, "
            f"which this version does not have yet; `validate executor SCENARIO` measures here and now."
        )
    loaded = load(path, overrides, seed)
    from perfmodel.validate.executor_bridge import validate_executor

    with progress_bar("validating") as progress:
        report = validate_executor(loaded, repeats=repeat, progress=progress)
    if as_json:
        print_json(report.to_json())
        return
    print(report)
