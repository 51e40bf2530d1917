"""`RunResult`: what came of serving a workload, simulated or executed, in vLLM's `bench serve` names."""

__all__ = ["RunResult"]

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from perfmodel.cost import Calibration, EngineProfile
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.errors import SpecError
from perfmodel.printable import Printable
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.sim.records.latencies import meets_slo
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import Trust, trust_of

if TYPE_CHECKING:
    from perfmodel.sim.records.whole_runs import WholeRuns


@dataclass(frozen=True, repr=False)
class RunResult(Printable):
    """The summary, JSON-ready, with the records behind it; it prints itself as `perfmodel simulate` does.

    `requests` and `steps` are None when the records were streamed to disk instead of kept.
    """

    scenario: Scenario
    clock: str  # simulated | executed
    summary: dict[str, Any]
    requests: RequestColumns | None = None
    steps: StepColumns | None = None
    num_blocks: int = 0  # KV blocks of one replica
    notes: tuple[str, ...] = field(default=())
    ensemble: "Ensemble | WholeRuns | None" = None  # what the intervals came from
    calibration: Calibration | None = None  # where one was given in place of the fitted ones
    profile: EngineProfile | None = None  # likewise
    measured_on: Mapping[str, Any] | None = None  # of another engine's run: its versions, device and settings

    def to_json(self) -> dict[str, Any]:
        """The document that `--json` prints."""
        return {
            "scenario": self.scenario.name,
            "clock": self.clock,
            **self.summary,
            "slo": self.slo,
            **({} if self.measured_on is None else {"measured_on": dict(self.measured_on)}),
            "notes": list(self.notes),
            "trust": None if (trust := self.trust) is None else trust.to_json(),
            "provenance": self.provenance(),
        }

    @property
    def slo(self) -> dict[str, Any] | None:
        """What the run is held to, in words, and whether it meets it; None without an SLO of all requests."""
        slo, attainment = self.scenario.slo, self.scenario.attainment
        if not slo.is_given:
            return None
        wanted = slo.in_words(attainment)
        return {"wanted": wanted, "attainment": attainment, "is_met": meets_slo(self.scenario, self.summary)}

    @property
    def trust(self) -> Trust | None:
        """How near the answer is to what was measured; None where it was measured, or calibrated for this run alone."""
        is_own = self.clock == "executed" or self.calibration is not None
        return None if is_own else trust_of(self.scenario)

    def provenance(self, kind: str = "run") -> dict[str, Any]:
        """Versions, engines, calibrations and the scenario as resolved; the times of an executed run are its own."""
        is_measured = self.clock == "executed"
        found = provenance_of([self.scenario], self.calibration, self.profile)
        used = replace(found, fitted=()) if is_measured else found
        return used.to_json(kind, {"clock": self.clock, "scenario": resolved(self.scenario)})

    def columns(self, of: str = "requests") -> dict[str, NDArray[Any]]:
        """One array per column, equally long: of `requests` (with ttft_s, tpot_s, e2el_s), or of `steps`.

        Raises SpecError where these records were not kept (`keep_steps=True` keeps steps).
        """
        if of not in ("requests", "steps"):
            raise SpecError(f"columns({of!r}): allowed 'requests' or 'steps'.")
        records = self.requests if of == "requests" else self.steps
        if records is None:
            raise SpecError(f"columns({of!r}): this run has none; simulate with keep_steps=True, and without `out`.")
        columns = {field.name: getattr(records, field.name) for field in fields(records)}
        found = {name: column for name, column in columns.items() if column is not None}
        if isinstance(records, RequestColumns):
            return found | {"ttft_s": records.ttft_s, "tpot_s": records.tpot_s, "e2el_s": records.e2el_s}
        return found | {"duration_s": records.end_s - records.start_s}
