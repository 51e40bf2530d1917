"""Sentences that a reader of a simulated answer should have seen beside it."""

__all__ = ["eager_notes", "network_notes", "run_notes", "workload_notes"]

from math import ceil

from perfmodel.cost import Calibration, profile_of, step_costs
from perfmodel.cost.calibrations.for_all import balance_notes
from perfmodel.cost.steps.host import host_fit, launch_seconds
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.routing import dropped_share, popularity_of
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs.engine.devices import engine_notes
from perfmodel.specs.engine.formats import serving_notes
from perfmodel.specs.networks import NetworkSpec
from perfmodel.specs.scenario import Scenario, price_notes


def run_notes(scenario: Scenario, used: Calibration, requests: RequestColumns, num_steps: int) -> tuple[str, ...]:
    """Notes of a run of `scenario` with the calibration `used` and `requests`; `num_steps` are those of all engines."""
    notes = []
    if used.origin == "datasheet":
        notes.append(
            f"No calibration for {used.device}: times are the datasheet roofline with assumed launch overheads, "
            f"a lower bound that real kernels exceed, often by half or more."
        )
    notes += network_notes(scenario)
    if scenario.engine.calibration is not None:
        own = profile_of(scenario.engine)
        fitted_to = own.source.partition(";")[0]
        notes.append(f"Host and front end as calibrated on one's own server: {own.name}, {fitted_to}.")
    if scenario.cluster.is_disaggregated and scenario.traffic.has_conversations:
        # vLLM's NixlConnector without bidirectional_kv_xfer (vllm-project/vllm #32553)
        notes.append(
            "Prefill replicas compute earlier answers again with each turn: the KV of answers is with the decode "
            "replicas, and none is sent back."
        )
    if scenario.routing.capacity_factor is not None:
        notes += _dropped(scenario, requests, num_steps)
    return (*notes, *_engine_notes(scenario), *price_notes(scenario))


def workload_notes(workload: Workload) -> list[str]:
    """How many of the requests that were made are not as the traffic has them, for want of context."""
    limit, total, found = f"max_model_len {workload.max_model_len:,}", f"{workload.num_drawn:,} requests", []
    if workload.num_refused:
        found.append(
            f"{workload.num_refused:,} of {total} have prompts beyond {limit} and are refused, as vLLM does: they "
            f"count as failed."
        )
    if workload.num_clipped:
        found.append(f"{workload.num_clipped:,} of {total} have prompts that were clipped to {limit}.")
    if workload.num_cut:
        found.append(f"{workload.num_cut:,} of {total} have answers that end where the context is full, at {limit}.")
    return found


def eager_notes(scenario: Scenario, mean_step_s: float) -> list[str]:
    """Whether launches without CUDA graphs show in a run whose steps take `mean_step_s` on average."""
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


def _engine_notes(scenario: Scenario) -> list[str]:
    """Notes on what is modelled of the model, on number formats that are not multiplied as they are stored, on
    balancing without effect, on versions taken for others, and on defaults that were taken for what is not given."""
    notes = []
    for pool in scenario.pools:
        notes += serving_notes(pool.model or scenario.model, pool.engine, pool.hardware or scenario.hardware)
        notes += balance_notes(scenario, pool.engine)
    notes += engine_notes(*(pool.engine for pool in scenario.pools), roles=[pool.role for pool in scenario.pools])
    return list(dict.fromkeys(notes))


def network_notes(scenario: Scenario) -> list[str]:
    """What was assumed of the network between nodes, where a replica needs one and the scenario names none."""
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
    """Note on KV assumed to move over a scale-up link between engines too large for the devices that it joins."""
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
    """How much the experts' capacity leaves out in a step of the run's mean number of tokens."""
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
