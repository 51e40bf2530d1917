"""`Shorthand`: a scenario in a few words, and its file mapping."""

import pathlib
import re
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import SpecError
from perfmodel.files.base import LONGEST_NAME
from perfmodel.files.catalog import Kind, expanded, find_file
from perfmodel.files.sandbox import is_allowed
from perfmodel.specs.devices import counted_device, find_device
from perfmodel.specs.scenario_file import load_traffic

_WITH_RATES = ("constant", "poisson", "poisson_fixed_count", "gamma")


@dataclass(frozen=True, slots=True)
class Shorthand:
    """A scenario in a few words; everything else has its default.

    hardware: names, aliases or paths; the first is the scenario's, plans choose between all. `2xh100`: a server of two
              over which the model is split; a plan has no more"""

    model: str  # name or path
    hardware: tuple[str, ...]
    traffic: str  # name, alias or path of a file in workloads/traffic
    rate: float | str | None  # requests per second, or with a unit; the traffic's own unless given
    slo: tuple[tuple[str, float | str], ...] = ()  # its fields as given: {"ttft_ms": "1s"}

    def to_data(self) -> dict[str, Any]:
        """Scenario file mapping. SpecError for unknown devices or traffic, or a rate where traffic has none."""
        counts, names = zip(*map(counted_device, self.hardware), strict=True)
        devices = [name_of("hardware", name) for name in names]
        data: dict[str, Any] = {
            "name": scenario_name(self.model, devices[0]),
            "model": self.model,
            "hardware": devices[0],
        }
        data["traffic"] = name_of("traffic", self.traffic) if self.rate is None else self._traffic_at_rate()
        if self.slo:
            data["slo"] = dict(self.slo)
        plan: dict[str, Any] = {}
        if len(devices) > 1:
            plan["space"] = {"hardware": devices}
        elif counts[0] is not None:
            data["engine"] = {"tensor_parallel_size": counts[0]}
        if given := [count for count in counts if count is not None]:
            plan["max_gpus"] = max(given)
        if plan:
            data["plan"] = plan
        return data

    def _traffic_at_rate(self) -> dict[str, Any]:
        traffic = load_traffic(name_of("traffic", self.traffic))
        if traffic.arrivals.process not in _WITH_RATES:
            raise SpecError(
                f"--rate {self.rate}: traffic {self.traffic} has arrivals of process {traffic.arrivals.process}, which "
                f"have no rate; leave --rate out, or choose traffic that has one."
            )
        data = traffic.model_dump(mode="json", exclude_defaults=True, exclude={"aliases"})
        data["arrivals"] = {
            **{key: value for key, value in data.get("arrivals", {}).items() if key != "stages"},
            "rate": self.rate,
        }
        return data


def name_of(kind: Kind, given: str) -> str:
    """Name for an alias; absolute path of another file."""
    path = expanded(given)
    if is_allowed(path) and path.is_file():
        return str(path.resolve())
    try:
        return find_device(given).name if kind == "hardware" else find_file(kind, given).stem
    except SpecError as error:
        raise SpecError(f"--{kind} {given}: {error}") from None


def scenario_name(model: str, device: str) -> str:
    """`llama-3.1-70b-h100-sxm-80gb`: a valid file name."""
    parts = [re.sub(r"\.(yaml|yml|json|gguf)$", "", pathlib.PurePath(part).name) for part in (model, device)]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts))[:LONGEST_NAME].strip("-.").lower() or "unnamed"
