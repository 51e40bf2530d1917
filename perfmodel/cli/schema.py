"""`perfmodel schema KIND`: the JSON Schema of a file, for editors."""

__all__ = ["SchemaKind", "schema"]

from enum import StrEnum
from typing import Annotated

import typer

from perfmodel.cli.terminal import print_json


class SchemaKind(StrEnum):
    """The kinds of files that users write."""

    scenario = "scenario"
    hardware = "hardware"
    family = "family"
    model = "model"
    traffic = "traffic"
    study = "study"


def schema(
    kind: Annotated[SchemaKind, typer.Argument(metavar="KIND", help="Which kind of file.", show_default=False)],
) -> None:
    """Print the JSON Schema of a kind of file, for completion and checks in editors."""
    from perfmodel import specs

    print_json(specs.schema(kind.value))
