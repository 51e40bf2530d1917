"""`TechniqueEntry`: which techniques there are, what switches each one on, and where it is executed and validated.

The entries are data, one file per family in workloads/techniques. What is said there of a switch is held against the
simulator by tests/contract/test_techniques.py; what was measured of it stands in reports, not here.
"""

__all__ = ["Move", "TechniqueEntry", "TechniqueFamily", "load_techniques"]

from typing import Literal

from pydantic import Field, model_validator

from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file, list_names
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.planning.step import StepSpec


class Move(Spec):
    """What the switch does: a metric of a run, of a `step` or of memory (as in `published`), and its direction."""

    metric: str
    direction: Literal["up", "down"]
    step: StepSpec | None = None


class TechniqueEntry(Spec):
    """One technique.

    page:      in docs/techniques, without the suffix
    scenario:  the file of workloads/scenarios in which it is switched; `setting`: overrides with and without it
    switch:    `--set` overrides that bring the technique; fields: what else belongs to it
    moves:     what the switch changes in the simulated answer
    missing:   why the switch does not work yet, where it does not
    pairs:     files of workloads/scenarios/techniques in which it is executed, against the same without it
    executed_not: why there are none
    published: ids of figures in workloads/scenarios/published
    """

    name: str
    page: str = Field(pattern="^[a-z0-9-]+$")
    scenario: str | None = None
    setting: tuple[str, ...] = ()
    switch: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    moves: Move | None = None
    missing: str | None = None
    pairs: tuple[str, ...] = ()
    executed_not: str | None = None
    published: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _says_all_or_why_not(self) -> "TechniqueEntry":
        shown = [bool(self.scenario), bool(self.switch), self.moves is not None]
        if not all(shown) and (any(shown) or self.missing is None):
            raise ValueError(f"{self.name}: give scenario, switch and moves, or say in `missing` why there is none")
        if bool(self.pairs) == (self.executed_not is not None):
            raise ValueError(f"{self.name}: give either `pairs` that execute it, or `executed_not` that says why not")
        return self


class TechniqueFamily(Spec):
    """One file: the techniques of a family."""

    family: str
    techniques: tuple[TechniqueEntry, ...] = Field(min_length=1)


def load_techniques() -> tuple[TechniqueFamily, ...]:
    """All families, in the order of their files' names. Raises SpecError for a file with a mistake."""
    files = [load_yaml(find_file("techniques", name)) for name in list_names("techniques")]
    return tuple(parse(TechniqueFamily, file.data, file.positions) for file in files)
