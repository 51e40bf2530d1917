"""Meaning of the flags of a server or load test at one version (hardware_specs/engines/commands).

Flags are modelled, irrelevant to timing, or relevant but not modelled. A dotted flag is a key of another's JSON
(`speculative-config.method`); `.*` stands for all other keys there."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal

from pydantic import Field

from perfmodel.files.base import Spec
from perfmodel.files.catalog import find_file, list_names
from perfmodel.files.validation import load_spec

Kind = Literal["integer", "number", "text", "switch", "json"]
Class = Literal["modelled", "irrelevant", "not_modelled"]
Takes = Literal["nothing", "one", "many", "maybe", "json"]


class ModelledFlag(Spec):
    """A flag that says something of a scenario.

    field:   of the scenario's file; one that begins with `line.` is for the reader of this command; none: nothing
    short:   of it, in the field's words
    only:    the values that are modelled, beside those of `map`; none: all"""

    field: str | None = None
    kind: Kind = "text"  # of its value; integers may have vLLM's suffixes (8k, 8K)
    map: dict[str, Any] = Field(default_factory=dict)  # values -> the field's; null leaves the field out
    only: tuple[str, ...] | None = None
    not_modelled: tuple[str, ...] = ()  # values that are taken for what `map` makes of them, and are not that
    inverse: bool = False  # a switch of the opposite of its field
    same_as: str | None = None  # another flag, whose other name it is
    takes: Takes | None = None  # how many values follow it, where `kind` does not say
    why: str = "this value"  # what is not modelled in other values
    always: bool = False  # it is written in command lines also where it is the default
    other_versions: bool = False  # it is of others than the described one
    write: dict[str, Any] = Field(default_factory=dict)  # the field's values -> this flag's, where they differ
    approximate: tuple[str, ...] = ()  # what is taken for something near: "value or pattern: what for"


class FlagGroup(Spec):
    """Flags of one class, for one reason.

    values:   take one; lists: one or more; optional: one or none; json: keys of other flags' JSON"""

    why: str
    switches: tuple[str, ...] = ()  # take no value; can be negated where the command does so
    values: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    json_keys: tuple[str, ...] = Field(default=(), alias="json")
    defaults: dict[str, Any] = Field(default_factory=dict)  # values that say what holds anyway, and are without effect
    other_versions: bool = False  # they are of others than the described one


class EnvironmentRules(Spec):
    """Variables of the environment: those that stand for a flag, those without a part in time (`HF_*`), and others.

    not_modelled: patterns, the first that fits counts, and what is not modelled"""

    modelled: dict[str, str] = Field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    not_modelled: dict[str, str] = Field(default_factory=dict)


class NodeRules(Spec):
    """A server over several nodes as a LeaderWorkerSet. `{command}`, `{nodes}`: its command line, their number.

    says:      what the nodes need beside the command line
    arguments: in every line; leader, worker: the shell's text of the first node and of the others"""

    says: str
    arguments: tuple[str, ...] = ()
    leader: str
    worker: str


class DynamoRules(Spec):
    """A worker of NVIDIA Dynamo; `version`: of the engine in `image`."""

    image: str
    version: str
    start: tuple[str, ...]
    options_flag: str = ""
    roles: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class ServingRules(Spec):
    """How deployments start a server and watch it; `{version}`: the engine's.

    images:       maker of the devices -> image; none: no image is known
    start:        the words before the model; arguments: behind the settings, with the address
    options_file: path of a file with all settings and `options`; options_flag: what names it
    roles:        role of a pool -> its arguments; none: it has no roles; ip_variable: the pod's address for them
    llm_d:        unified or roles -> base of llm-d's recipes
    metrics:      vLLM's metric, or its histogram's name -> this server's; gauge_labels: which series of a gauge count;
                  rank_label: data-parallel ranks"""

    source: str
    images: dict[str, str]
    keeps_entrypoint: bool = False  # the image's own comes before the command
    start: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    options_file: str = ""
    options_flag: str = ""
    options: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)
    roles: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    ip_variable: str = ""
    shares_ranks: bool = True  # data-parallel ranks may have several tensor-parallel ones each
    nodes: NodeRules | None = None
    dynamo: DynamoRules | None = None
    llm_d: dict[str, str] = Field(default_factory=dict)
    metrics_path: str = "/metrics"
    metrics: dict[str, str]
    gauge_labels: str = ""
    rank_label: str = "engine"


@dataclass(frozen=True, slots=True)
class FlagRule:
    """Rule for one flag."""

    name: str
    kind: Class
    takes: Takes
    why: str = ""  # the reason for its class
    default: Any = None  # a value without effect, or several, where one is known
    modelled: ModelledFlag | None = None
    is_of_others: bool = False
    same_as: str = ""  # the flag whose other name it is

    def says_nothing(self, value: Any) -> bool:
        """Whether `value` has no effect."""
        known = self.default if isinstance(self.default, list) else [self.default]
        return value is False or any(str(value).lower() == str(item).lower() for item in known if item is not None)


class CommandDescription(Spec):
    """A file of hardware_specs/engines/commands.

    starts:      how the command begins: words of which all but options between them must be there
    images:      of containers that hold it; entrypoints: those that start it when they are given flags only
    subcommands: words before it that are skipped
    config:      the flags that name a YAML file with more flags; config_wins: what is in it counts before the line's"""

    name: str
    title: str
    role: Literal["server", "load"] = "server"  # a server, or a load test of one
    engine: str | None = None  # of hardware_specs/engines, of a server
    version: str  # whose flags these are
    source: str
    starts: tuple[tuple[str, ...], ...]
    images: tuple[str, ...] = ()
    entrypoints: tuple[str, ...] = ()
    positional: str | None = None  # the flag that a word without one stands for
    config: tuple[str, ...] = ()
    config_wins: bool = False
    can_negate: bool = False  # switches have a `--no-` form
    short: dict[str, str] = Field(default_factory=dict)  # one dash: the flag that is meant
    modelled: dict[str, ModelledFlag] = Field(default_factory=dict)
    irrelevant: tuple[FlagGroup, ...] = ()
    not_modelled: tuple[FlagGroup, ...] = ()
    environment: EnvironmentRules = EnvironmentRules()
    serving: ServingRules | None = None

    @cached_property
    def rules(self) -> dict[str, FlagRule]:
        """All flags by name."""
        rules = {}
        for name, flag in self.modelled.items():
            target = self.modelled[flag.same_as] if flag.same_as else flag
            takes = flag.takes or ("nothing" if target.kind == "switch" else "one")
            rules[name] = FlagRule(
                *(name, "modelled", takes),
                modelled=target,
                is_of_others=flag.other_versions,
                same_as=flag.same_as or "",
            )
        groups: list[tuple[Class, FlagGroup]] = [("irrelevant", group) for group in self.irrelevant]
        groups += [("not_modelled", group) for group in self.not_modelled]
        for kind, group in groups:
            listed: dict[Takes, tuple[str, ...]] = {
                "nothing": group.switches,
                "one": group.values,
                "many": group.lists,
                "maybe": group.optional,
                "json": group.json_keys,
            }
            for takes, names in listed.items():
                for name in names:
                    default = group.defaults.get(name)
                    rules[name] = FlagRule(name, kind, takes, group.why, default, is_of_others=group.other_versions)
        return rules

    @cached_property
    def parents(self) -> frozenset[str]:
        """Flags with dotted JSON keys."""
        return frozenset(name.partition(".")[0] for name in self.rules if "." in name)

    def rule(self, name: str) -> FlagRule | None:
        """Rule of flag `name`, or of its wildcard; None if unknown."""
        rule, parts = self.rules.get(name), name.split(".")[:-1]
        while rule is None and parts:
            rule = self.rules.get(".".join((*parts, "*"))) or self.rules.get(".".join(parts))
            if rule is not None and rule.takes == "one":
                return None
            parts.pop()
        return rule

    def unmodelled_variable(self, variable: str) -> str | None:
        """Effect of an environment variable that is not modelled; None if irrelevant to timing."""
        if any(fnmatchcase(variable, pattern) for pattern in self.environment.irrelevant):
            return None
        reasons = (why for pattern, why in self.environment.not_modelled.items() if fnmatchcase(variable, pattern))
        return next(reasons, "what is not known of this variable")


def load_command(name: str) -> CommandDescription:
    """Command description by name. Raises SpecError for a missing or malformed one."""
    return load_spec(CommandDescription, find_file("commands", name))


def all_commands() -> tuple[CommandDescription, ...]:
    """All command descriptions."""
    return tuple(load_command(name) for name in list_names("commands"))


def serving_command(engine: str) -> CommandDescription | None:
    """The server of `engine` that deployments start; None where none is described."""
    return next((command for command in all_commands() if command.engine == engine and command.serving), None)


def about_flag(name: str) -> str:
    """Field set by server flag `name` (or a JSON key of one), or why none is; empty without a flag.

    Underscores count as hyphens; vLLM's flag takes precedence."""
    wanted = name.replace("_", "-")
    servers = [command for command in all_commands() if command.role == "server"]
    for command in sorted(servers, key=lambda command: command.name != "vllm"):
        rules = [rule for key, rule in command.rules.items() if key.rpartition(".")[2].replace("_", "-") == wanted]
        for rule in sorted(rules, key=lambda rule: rule.kind != "modelled"):
            if rule.modelled is None:
                effect = "affects time and is not modelled" if rule.kind == "not_modelled" else "does not affect time"
                return f"a flag of {command.title} that {effect} ({rule.why}); leave it out"
            if rule.modelled.field and rule.modelled.field.startswith("engine."):
                return f"a flag of {command.title}; write it as {rule.modelled.field}"
    return ""
