"""A scenario as an answer is asked for it: by its name or file, or by flags, `--model llama-3.1-70b --hardware h100`.

What the flags leave open is assumed, and said in the notes of the answer.
"""

__all__ = ["FLAG_FIELDS", "LIMITS", "MEMORY_FLAGS", "MOST_KINDS", "RUN_FLAGS", "STEP_FLAGS", "TRAFFIC", "Asked", "load"]

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perfmodel.errors import SpecError

if TYPE_CHECKING:
    from perfmodel.specs.scenario import Scenario

TRAFFIC = "chat"  # where nothing else is asked for
MOST_KINDS = 20  # of devices
_LEAST_BARE_MS = 5  # below, whoever leaves the unit out may well mean seconds
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
# Limits on single requests, `--ttft`, and on a statistic of all of them, `--ttft-p99`, with the fields of an SLO.
LIMITS = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2el_ms"}
LIMITS |= {f"{name}-{statistic}": f"{name}_{statistic}_ms" for name in (*LIMITS, "itl") for statistic in _STATISTICS}
# Each flag, and the field of a scenario that it says.
FLAG_FIELDS: Mapping[str, str] = {
    **{"model": "model", "hardware": "hardware", "rate": "traffic.arrivals.rate", "traffic": "traffic"},
    **{flag: f"slo.{field}" for flag, field in LIMITS.items()},
}
# Those that count for what lies in memory, for a step, and for a run.
MEMORY_FLAGS = ("model", "hardware")
STEP_FLAGS = (*MEMORY_FLAGS, "rate", "traffic")
RUN_FLAGS = (*MEMORY_FLAGS, "rate", *LIMITS, "traffic")


@dataclass(frozen=True)
class Asked:
    """scenario: a name or a path; flags: of those that the command has, what was given, by their names."""

    scenario: str | None
    flags: Mapping[str, str | None]

    @property
    def given(self) -> dict[str, str]:
        """The flags that were given."""
        return {name: value for name, value in self.flags.items() if value is not None}

    @property
    def arguments(self) -> list[str]:
        """What stands before the flags on the command line."""
        return [] if self.scenario is None else [self.scenario]

    def load(self, overrides: Sequence[str] | None, seed: int | None = None) -> "Scenario":
        """The scenario, with `--set` and `--seed` applied. Raises SpecError as `source` and `load_scenario` do."""
        return load(self.source(), overrides, seed)

    def source(self, num_devices: int = 1) -> str:
        """What names the scenario: a name or a path, or the text of what the flags say.

        num_devices: kinds of devices that the command takes

        Raises SpecError for a file beside flags, for neither, and for flags without a model or a device.
        """
        if self.scenario is None:
            from perfmodel.specs.scenario_source import as_text

            return as_text(self.data(num_devices), self._places())
        for name, value in self.given.items():
            raise SpecError(
                f"{self.scenario} beside --{name} {value}: the flags stand for a scenario without a file; change one "
                f"with --set, or leave it out."
            )
        from perfmodel.specs.scenario_source import given_source

        return given_source(self.scenario)

    def data(self, num_devices: int = MOST_KINDS) -> dict[str, Any]:
        """The mapping of the scenario file that the flags stand for. See `source`."""
        given = self.given
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
                f"--hardware {given['hardware']}: found {len(devices)} devices, allowed {num_devices}; `perfmodel "
                f"plan` chooses between several."
            )
        from perfmodel.files.yaml_loader import parse_value
        from perfmodel.specs.shorthand import Shorthand

        slo = tuple((field, _limit(flag, given[flag])) for flag, field in LIMITS.items() if flag in given)
        rate = parse_value(given["rate"], "--rate") if "rate" in given else None
        return Shorthand(given["model"], devices, given.get("traffic", TRAFFIC), rate, slo).to_data()

    def _places(self) -> dict[str, str]:
        """Field -> the flag that said it, for errors to name."""
        return {FLAG_FIELDS[name]: f"--{name} {value}" for name, value in self.given.items()}

    def assumed(
        self, scenario: "Scenario", overrides: Sequence[str] | None = None, chosen: Set[str] = frozenset()
    ) -> tuple[str, ...]:
        """A note on what flags and `--set` have left open; none where a file says it all.

        chosen: fields that the answer itself chooses
        """
        if self.scenario is not None:
            return ()
        given = {text.partition("=")[0].strip() for text in overrides or ()} | chosen
        assumptions = "; ".join(self._assumptions(scenario, given))
        return (f"Assumed: {assumptions}. Change any of it with --set.",) if assumptions else ()

    def _assumptions(self, scenario: "Scenario", given: Set[str]) -> Iterator[str]:
        """What stands in for each flag that the command has and that is not given, nor its field by `--set`."""
        traffic, engine = scenario.traffic, scenario.engine
        absent = [name for name, value in self.flags.items() if value is None]
        if (
            "traffic" in absent
            and "traffic" not in given
            and not {"traffic.input_tokens", "traffic.output_tokens"} <= given
        ):
            yield f"traffic {traffic.name} ({traffic.source})"
        if "rate" in absent and traffic.arrivals.rate and not given & {"traffic.arrivals.rate", "traffic.arrivals"}:
            yield f"{traffic.arrivals.rate:g} requests/s, the rate of {traffic.name or 'the traffic'}"
        if "ttft" in self.flags and not scenario.slo.is_given:
            yield "no limits on latency"
        if not given & {"engine", "engine.profile", "engine.version"}:
            yield f"{engine.described.label} with its defaults"
        if scenario.plan is None and not given & {"engine", "engine.tensor_parallel_size"}:
            yield f"tensor_parallel_size {engine.tensor_parallel_size}"


def _limit(flag: str, text: str) -> Any:
    """A limit as it was given. Raises SpecError for a small number without a unit: seconds or milliseconds?"""
    from perfmodel.files.yaml_loader import parse_value

    value = parse_value(text, f"--{flag}")
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LEAST_BARE_MS:
        raise SpecError(f"--{flag} {text}: got a number without a unit; write {value:g}s or {value:g}ms.")
    return value


def load(scenario: str, overrides: Sequence[str] | None, seed: int | None = None) -> "Scenario":
    """The scenario, of stdin for `-`, with `--set` and `--seed` applied."""
    from perfmodel.specs import load_scenario
    from perfmodel.specs.scenario_source import given_source

    changes = list(overrides or ())
    if seed is not None:
        changes.append(f"seed={seed}")
    return load_scenario(given_source(scenario), changes)
