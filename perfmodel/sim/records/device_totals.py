"""`DeviceTotals`: what only the driver knows about a run, and what its devices cost in money and energy."""

__all__ = ["DeviceTotals", "costs"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfmodel.sim.records.latencies import ratio


@dataclass(frozen=True)
class DeviceTotals:
    """What only the driver knows about a run. Fields that a clock does not know are None.

    num_devices: of all engines together
    energy_split_j: `energy_j` by what takes it: idle, memory, compute
    bound_share: share of the busy time by what bounded it; mfu, mbu: over the whole run, per device
    pipeline_bubble_share: of the time of devices whose engine had plans under way, what they had nothing to do in; None
                 without pipeline stages
    kv_cache_usage_peak: of the engine that was fullest, a fraction
    device_s:    that devices were there, summed; num_devices over the whole run unless given
    usd_per_hour: of all devices, on the average of the run
    prompt_cost_share: of the bill, what prompts cost; the answers cost the rest
    num_rejected, num_retries: requests that the gateway refused, each time that it did, and times one was sent again
    pools, kv_transfer: a mapping for each pool where there are several, and for what was moved between them
    kv_offload: a mapping for what went to a second tier and came back
    """

    num_devices: int
    num_preemptions: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_hit: int = 0
    energy_j: float | None = None
    energy_split_j: Mapping[str, float] | None = None
    mfu: float | None = None
    mbu: float | None = None
    bound_share: Mapping[str, float] = field(default_factory=dict)
    pipeline_bubble_share: float | None = None
    kv_cache_usage_peak: float | None = None
    device_s: float | None = None
    usd_per_hour: float | None = None
    prompt_cost_share: float | None = None
    num_rejected: int = 0
    num_retries: int = 0
    pools: Sequence[Mapping[str, Any]] = ()
    kv_transfer: Mapping[str, Any] | None = None
    kv_offload: Mapping[str, Any] | None = None


def costs(totals: DeviceTotals, duration: float, inputs: int, outputs: int) -> dict[str, Any]:
    """Cost and energy of a run of `duration` seconds that answered `inputs` tokens with `outputs`; see docs/costs.md.

    totals: device seconds, price and energy of the run

    None where there is no price, no energy, or no token to divide by.
    """
    device_s = totals.num_devices * duration if totals.device_s is None else totals.device_s
    hourly, energy, share = totals.usd_per_hour, totals.energy_j, totals.prompt_cost_share
    usd = hourly * duration / 3600 if hourly is not None else None
    of_prompts = usd * share if usd is not None and share is not None else None
    of_answers = usd - of_prompts if usd is not None and of_prompts is not None else None
    return {
        "gpu_hours": device_s / 3600,
        "mean_num_devices": ratio(device_s, duration),
        "output_throughput_per_gpu": ratio(outputs, device_s),
        "total_token_throughput_per_gpu": ratio(inputs + outputs, device_s),
        "usd_total": usd,
        "usd_per_million_tokens": _per_million(usd, inputs + outputs),
        "usd_per_million_output_tokens": ratio(hourly * duration / 3600 * 1e6, outputs) if hourly is not None else None,
        "usd_per_million_input_tokens_split": _per_million(of_prompts, inputs),
        "usd_per_million_output_tokens_split": _per_million(of_answers, outputs),
        "energy_j": energy,
        "energy_split_j": None if totals.energy_split_j is None else dict(totals.energy_split_j),
        "energy_wh": None if energy is None else energy / 3600,
        "mean_power_w": None if energy is None else ratio(energy, device_s),
        "joules_per_output_token": None if energy is None else ratio(energy, outputs),
    }


def _per_million(usd: float | None, tokens: int) -> float | None:
    return None if usd is None else ratio(usd * 1e6, tokens)
