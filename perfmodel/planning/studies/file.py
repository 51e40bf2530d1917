"""From a study file to a `Study`: read, checked, and the file of its base scenario found."""

__all__ = ["BaseScenario", "StudyFile", "list_studies", "load_study"]

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.catalog import find_file, list_names
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import Path, Positions, load_yaml
from perfmodel.planning.studies.spec import Setting, Study
from perfmodel.specs.overrides import as_overrides


@dataclass(frozen=True, slots=True)
class BaseScenario:
    """Where a study's scenario is: a file, or a block inside the study's own; `overrides` go before all others."""

    path: str
    inside: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyFile:
    """A study with its file, in which mistakes are looked up."""

    path: pathlib.Path
    study: Study
    base: BaseScenario
    executed_base: BaseScenario
    positions: Positions

    def where(self, place: Path) -> str:
        """`file:line: place` of what a mistake is in."""
        return f"{self.positions.where(place)}: {'.'.join(map(str, place))}"


def list_studies() -> list[str]:
    """Names of the studies in workloads/scenarios/studies, sorted."""
    return list_names("studies")


def load_study(path_or_name: str | pathlib.Path, overrides: Sequence[str] = ()) -> StudyFile:
    """The study of a file, or one of workloads/scenarios/studies by name; `overrides` change its base scenario.

    Raises SpecError: `file:line: field: what was found, what is allowed`, one line per mistake.
    """
    path = find_file("studies", path_or_name)
    loaded = load_yaml(path)
    if not isinstance(loaded.data.get("study", ""), str) or "study" not in loaded.data:
        raise SpecError(
            f"{path}: found no `study: NAME`, so this is not a study; scenarios are for `perfmodel simulate` and "
            f"`perfmodel execute`."
        )
    study = parse(Study, loaded.data, loaded.positions)
    base = _base(study.base, study.set, overrides, ("base",), path, loaded.positions)
    executed = study.executed
    executed_base = base
    if executed is not None:
        if executed.base is None:
            more = (*base.overrides, *as_overrides(executed.set))
            executed_base = BaseScenario(base.path, base.inside, more)
        else:
            place = ("executed", "base")
            executed_base = _base(executed.base, executed.set, (), place, path, loaded.positions)
    return StudyFile(path, study, base, executed_base, loaded.positions)


def _base(
    given: str | dict[str, Any],
    setting: Setting,
    overrides: Sequence[str],
    place: tuple[str, ...],
    file: pathlib.Path,
    positions: Positions,
) -> BaseScenario:
    more = (*as_overrides(setting), *overrides)
    if isinstance(given, dict):
        return BaseScenario(str(file), place, more)
    beside = file.parent / given
    try:
        found = beside if beside.is_file() else find_file("scenarios", given)
    except SpecError as error:
        raise SpecError(f"{positions.where(place)}: {'.'.join(place)}: {error}") from None
    return BaseScenario(str(found), (), more)
