"""Every flag that a command has is in its table once, in one class, with what it takes."""

from collections import Counter
from pathlib import Path

import pytest

from perfmodel.files.base import default_at
from perfmodel.specs.commands.description import CommandDescription, all_commands, load_command
from perfmodel.specs.scenario import Scenario

COMMANDS = all_commands()
# Flags of each command as its own source has them, one a line: `add_argument` of its parser and the fields of the
# dataclasses that its parser is made from.
LISTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("listed", LISTS, ids=[file.stem for file in LISTS])
def test_every_flag_of_the_source_has_a_class(listed: Path) -> None:
    """And no other has one, unless it is marked as of other versions, or is the beginning of one (argparse)."""
    name, _, version = listed.stem.rpartition("-")
    description = load_command(name)
    assert description.version == version
    flags = set(listed.read_text(encoding="utf-8").split()) - set(description.config)
    named = {flag.partition(".")[0] for flag in description.rules}
    assert flags - named == set()
    others = {flag for flag in named - flags if flag in description.rules}
    others = {other for other in others if not any(flag.startswith(other) for flag in flags)}
    assert {flag for flag in others if not description.rules[flag].is_of_others} == set()


@pytest.mark.parametrize("description", COMMANDS, ids=[each.name for each in COMMANDS])
def test_a_flag_is_in_one_place(description: CommandDescription) -> None:
    """In one class and one group; short names and variables lead to flags that there are."""
    names = list(description.modelled)
    for group in (*description.irrelevant, *description.not_modelled):
        names += [*group.switches, *group.values, *group.lists, *group.optional, *group.json_keys]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    known = {*description.rules, *description.parents, *description.config}
    assert set(description.short.values()) <= known
    assert set(description.environment.modelled.values()) <= known
    for group in (*description.irrelevant, *description.not_modelled):
        assert set(group.defaults) <= {*group.switches, *group.values, *group.lists, *group.optional, *group.json_keys}


@pytest.mark.parametrize("description", COMMANDS, ids=[each.name for each in COMMANDS])
def test_fields_are_a_scenario_s(description: CommandDescription) -> None:
    """What is modelled goes to a field that a scenario has, or to the reader of the command."""
    for name, flag in description.modelled.items():
        if flag.field is None or flag.field.startswith("line."):
            continue
        block, _, rest = flag.field.partition(".")
        field = Scenario.model_fields[block]
        assert not rest or default_at(Scenario, flag.field.split(".")) is not None or _has(field, rest), name


def _has(field: object, rest: str) -> bool:
    """Whether the block's own class has the field, whose default is None."""
    annotation = getattr(field, "annotation", None)
    for part in rest.split("."):
        classes = [annotation, *getattr(annotation, "__args__", ())]
        found = next((each.model_fields[part] for each in classes if part in getattr(each, "model_fields", {})), None)
        if found is None:
            return False
        annotation = found.annotation
    return True
