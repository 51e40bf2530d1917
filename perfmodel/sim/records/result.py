"""`RunResult`: outcome of a simulated or executed run in vLLM's `bench serve` names, and its caveats."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from perfmodel.cost import Calibration, EngineProfile, profile_of, step_costs
from perfmodel.cost.calibrations.for_all import balance_notes
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.cost.steps.host import host_fit, launch_seconds
from perfmodel.errors import SpecError
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import dropped_share, popularity_of
from perfmodel.renderable import Renderable
from perfmodel.sim.records.columns import RequestColumns, StepColumns, meets_slo
from perfmodel.sim.records.ensemble import Ensemble
from perfmodel.sim.replica.host_cores import core_notes
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.engine.devices import engine_notes
from perfmodel.specs.engine.formats import serving_notes
from perfmodel.specs.hardware import NetworkSpec
from perfmodel.specs.scenario import Scenario, price_notes
from perfmodel.trust import Trust, trust_of


def run_notes(scenario: Scenario, used: Calibration, requests: RequestColumns, num_steps: int) -> tuple[str, ...]:
    """Caveats of a run of `scenario` with the calibration `used`, `requests` and `num_steps` over all engines."""
    notes = []
    if used.origin == "datasheet":
        notes.append(
            f"No calibration for {used.device}: times are the datasheet roofline with assumed launch overheads, "
            f"a lower bound that real kernels exceed, often by half or more."
        )
    notes += network_notes(scenario)
    notes += core_notes(scenario)
    if scenario.engine.calibration is not None:
        own = profile_of(scenario.engine)
        notes.append(
            f"Host and front end as calibrated on one's own server: {own.name}, {own.source.partition(';')[0]}."
        )
    if scenario.cluster.is_disaggregated and scenario.traffic.has_conversations:
        # vLLM's NixlConnector without bidirectional_kv_xfer (vllm-project/vllm #32553)
        notes.append(
            "Prefill replicas compute earlier answers again with each turn: the KV of answers is with the decode "
            "replicas, and none is sent back."
        )
    if scenario.routing.capacity_factor is not None:
        notes += _dropped(scenario, requests, num_steps)
    of_engines = []
    for pool in scenario.pools:
        of_engines += serving_notes(pool.model or scenario.model, pool.engine, pool.hardware or scenario.hardware)
        of_engines += balance_notes(scenario, pool.engine)
    of_engines += engine_notes(*(pool.engine for pool in scenario.pools), roles=[pool.role for pool in scenario.pools])
    return (*notes, *dict.fromkeys(of_engines), *price_notes(scenario))


def workload_notes(workload: Workload) -> list[str]:
    """Counts of requests altered to fit the context."""
    limit, total, notes = f"max_model_len {workload.max_model_len:,}", f"{workload.num_drawn:,} requests", []
    if workload.num_refused:
        notes.append(
            f"{workload.num_refused:,} of {total} have prompts beyond {limit} and are refused, as vLLM does: they "
            f"count as failed."
        )
    if workload.num_clipped:
        notes.append(f"{workload.num_clipped:,} of {total} have prompts that were clipped to {limit}.")
    if workload.num_cut:
        notes.append(f"{workload.num_cut:,} of {total} have answers that end where the context is full, at {limit}.")
    if workload.num_left_out:
        notes.append(
            f"{workload.num_left_out:,} requests of agents' sessions are left out, from a prompt beyond {limit} "
            f"on; raise engine.max_model_len."
        )
    if workload.num_resumed:
        notes.append(
            f"{workload.num_resumed:,} of {total} resume an answer that was cut in the iteration before; they compute "
            f"{workload.num_resumed_tokens:,} tokens again, prompts included."
        )
    return notes


def eager_notes(scenario: Scenario, mean_step_s: float) -> list[str]:
    """Whether eager launches show in a run with steps of `mean_step_s` on average."""
    engine = scenario.engine
    if not engine.enforce_eager or scenario.hardware.kind != "gpu":
        return []
    costs = step_costs(scenario)
    launches_s, num_kernels = launch_seconds(costs.graph, costs.timer)
    if not launches_s:
        return []
    took = f"Without CUDA graphs the host takes about {launches_s * 1e3:.1f} ms to launch the {num_kernels:,} kernels"
    beside_s = host_fit(costs.graph, costs.timer).hidden_s(1)  # what is planned beside the device, too
    if beside_s >= 0.9 * mean_step_s:
        return [
            f"{took} of a decode step: that is what decode steps take here ({mean_step_s * 1e3:.1f} ms on average)."
        ]
    planned = ", and the next step is planned beside it" if engine.plans_ahead else ""
    return [
        f"{took} of a decode step. Launches run ahead of the device{planned}: they are hidden in steps that take the "
        f"device longer (here {mean_step_s * 1e3:.1f} ms on average), so enforce_eager costs little or nothing there."
    ]


def network_notes(scenario: Scenario) -> list[str]:
    """Assumed network between nodes, where the scenario needs one and names none."""
    notes = []
    for pool in scenario.pools:
        hardware, num_devices = pool.hardware or scenario.hardware, pool.engine.num_devices
        per_node = hardware.devices_per_node
        if num_devices <= per_node or not (hardware.network or NetworkSpec()).is_assumed(hardware):
            continue
        link = hardware.network_link
        notes.append(
            f"A replica of {num_devices} devices spans {ceil(num_devices / per_node)} nodes of {per_node} "
            f"{hardware.name}; the network between them is assumed to be {link.name}, "
            f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s one way for each device. Set cluster.network to the real one."
        )
    return [*dict.fromkeys(notes), *_kv_notes(scenario)]


def _kv_notes(scenario: Scenario) -> list[str]:
    """Note on KV assumed to move over a scale-up link between engines that span more devices than it joins."""
    transfer, by_role = scenario.cluster.kv_transfer, {"prefill": 0, "decode": 0}
    if not scenario.cluster.is_disaggregated or transfer.link or transfer.bandwidth_bytes_per_s is not None:
        return []
    for role in by_role:
        by_role[role] = min(pool.engine.num_devices for pool in scenario.pools if pool.role == role)
    together, per_node = sum(by_role.values()), scenario.hardware.devices_per_node
    if together <= per_node:
        return []
    return [
        f"KV is assumed to move over {transfer.link_of(scenario.hardware).name}, which joins {per_node} devices, and a "
        f"prefill and a decode engine have {together}. Set cluster.kv_transfer.link to the link between their nodes."
    ]


def _dropped(scenario: Scenario, requests: RequestColumns, num_steps: int) -> list[str]:
    """Tokens dropped by expert capacity in a step of the mean token count."""
    blocks = [layer.ffn for layer, _ in scenario.model.layers if isinstance(layer.ffn, MoEFFN)]
    if not blocks:
        return ["The model has no mixture of experts: routing.capacity_factor changes nothing."]
    ffn, factor = blocks[0], scenario.routing.capacity_factor
    assert factor is not None
    computed = requests.num_prompt_tokens.sum() - requests.num_cached_tokens.sum() + requests.num_output_tokens.sum()
    tokens = max(1, round(float(computed) / num_steps * scenario.engine.data_parallel_size))
    chances = popularity_of(scenario.routing)(ffn.num_experts, min(ffn.top_k, ffn.num_experts))
    share = dropped_share(ffn, tokens, factor, chances)
    return [
        f"With capacity_factor {factor:g}, experts drop about {share:.0%} of the tokens routed to them in a step "
        f"of {tokens} tokens, the mean of this run; the effect on answers is not modelled."
    ]


if TYPE_CHECKING:
    from perfmodel.sim.records.whole_runs import WholeRuns


@dataclass(frozen=True, repr=False)
class RunResult(Renderable):
    """JSON-ready summary and the records behind it; prints as `perfmodel simulate` does.

    `requests` and `steps` are None when streamed to disk instead of kept."""

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
    cut_short: str = ""  # what ended an executed run before its traffic did

    def to_json(self) -> dict[str, Any]:
        """The `--json` document."""
        return {
            "scenario": self.scenario.name,
            "clock": self.clock,
            **self.summary,
            "slo": self.slo,
            **({} if self.measured_on is None else {"measured_on": dict(self.measured_on)}),
            **({"cut_short": self.cut_short} if self.cut_short else {}),
            "notes": list(self.notes),
            "trust": None if (trust := self.trust) is None else trust.to_json(),
            "provenance": self.provenance(),
        }

    @property
    def slo(self) -> dict[str, Any] | None:
        """SLO in words and whether the run meets it; None without an SLO on all requests."""
        slo, attainment = self.scenario.slo, self.scenario.attainment
        if not slo.is_given:
            return None
        wanted = slo.in_words(attainment)
        return {"wanted": wanted, "attainment": attainment, "is_met": meets_slo(self.scenario, self.summary)}

    @property
    def trust(self) -> Trust | None:
        """Expected accuracy; None for measured runs or a calibration given for this run."""
        return None if self.clock == "executed" or self.calibration is not None else trust_of(self.scenario)

    def provenance(self, kind: str = "run") -> dict[str, Any]:
        """Versions, engines, calibrations and the resolved scenario; executed runs carry their own times."""
        is_measured = self.clock == "executed"
        provenance = provenance_of([self.scenario], self.calibration, self.profile)
        if is_measured:
            provenance = replace(provenance, fitted=())
        return provenance.to_json(kind, {"clock": self.clock, "scenario": resolved(self.scenario)})

    def columns(self, of: str = "requests") -> dict[str, NDArray[Any]]:
        """Equally long arrays by column `of` "requests" (with ttft_s, tpot_s, e2el_s) or "steps".

        Raises SpecError where these records were not kept (`keep_steps=True` keeps steps)."""
        if of not in ("requests", "steps"):
            raise SpecError(f"columns({of!r}): expected 'requests' or 'steps'.")
        records = self.requests if of == "requests" else self.steps
        if records is None:
            raise SpecError(f"columns({of!r}): this run has none; simulate with keep_steps=True, and without `out`.")
        columns = {field.name: getattr(records, field.name) for field in fields(records)}
        present = {name: column for name, column in columns.items() if column is not None}
        if isinstance(records, RequestColumns):
            return present | {"ttft_s": records.ttft_s, "tpot_s": records.tpot_s, "e2el_s": records.e2el_s}
        return present | {"duration_s": records.end_s - records.start_s}
