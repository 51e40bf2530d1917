"""Totals of a simulated cluster's devices: energy, utilisation, blocks; per pool and overall."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfmodel.cost import Usage, usd_per_hour
from perfmodel.cost.power import idle_power_w
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.fleet.cluster import Cluster
from perfmodel.sim.fleet.pool import Pool
from perfmodel.sim.records.collector import Collector
from perfmodel.sim.records.columns import ratio, request_latencies
from perfmodel.sim.records.summary import DeviceTotals


def device_totals(cluster: Cluster, collector: Collector) -> DeviceTotals:
    """Totals of all devices. Each pool's timer counts one device per engine."""
    pools, dynamic, duration = cluster.pools, cluster.dynamic, collector.end_tick / 1e12
    whole, device_s, bandwidth_s = Usage(), 0.0, 0.0
    engine_s = [_engine_s(cluster, pool, collector) for pool in pools]
    for pool, seconds in zip(pools, engine_s, strict=True):
        usage, weight = pool.usage(), pool.devices_per_engine
        whole.add(usage, weight)
        device_s += seconds * weight
        bandwidth_s += weight * usage.hbm_bytes / pool.scenario.hardware.memory_bandwidth
    schedulers = [engine.loop.scheduler for engine in cluster.engines]
    splits = [pool.energy_split_j(seconds) for pool, seconds in zip(pools, engine_s, strict=True)]
    is_plain = len(pools) == 1 and not (dynamic and dynamic.fleets)
    usd_per_hour, prompt_cost_share, cached_cost_share = _bill(cluster, engine_s, duration)
    return DeviceTotals(
        num_devices=sum(pool.num_devices for pool in pools),
        num_preemptions=sum(s.num_preemptions for s in schedulers),
        prefix_tokens_asked=sum(s.num_prefix_tokens_asked for s in schedulers),
        prefix_tokens_hit=sum(s.num_prefix_tokens_hit for s in schedulers),
        energy_j=sum(pool.energy_j(seconds) for pool, seconds in zip(pools, engine_s, strict=True)),
        energy_split_j={name: sum(split[name] for split in splits) for name in splits[0]},
        device_s=device_s,
        mfu=whole.peak_compute_s / device_s if device_s else None,
        mbu=bandwidth_s / device_s if device_s else None,
        bound_share={bound: seconds / whole.busy_s for bound, seconds in whole.bound_s.items()},
        pipeline_bubble_share=_bubble_share(pools),
        kv_cache_usage_peak=max(usage_peak(pool, collector) for pool in pools),
        usd_per_hour=usd_per_hour,
        prompt_cost_share=prompt_cost_share,
        cached_cost_share=cached_cost_share,
        owned=_owned(cluster),
        num_rejected=dynamic.gateway.num_rejected if dynamic is not None else 0,
        num_retries=dynamic.gateway.num_retries if dynamic is not None else 0,
        pools=() if is_plain else [_of_pool(cluster, *of, collector) for of in zip(pools, engine_s, strict=True)],
        kv_transfer=kv_transferred(cluster, duration),
        ec_transfer=None if cluster.encoding is None else cluster.encoding.moved,
        image_processing=images_processed(cluster, collector.end_tick),
        kv_offload=kv_offloaded(cluster),
    )


def _bubble_share(pools: Sequence[Pool]) -> float | None:
    staged = [pool for pool in pools if pool.pipelines]
    if not staged:
        return None
    return ratio(sum([pool.bubble_s for pool in staged]), sum([pool.under_way_s for pool in staged]))


def kv_offloaded(cluster: Cluster) -> dict[str, Any] | None:
    """Blocks moved to and from second tiers, and bytes over all devices' links; with tiers behind them, theirs."""
    tiers = [
        (host, 0.0 if (cost := pool.backend.restore) is None else pool.devices_per_engine * cost.block_bytes)
        for pool in cluster.pools
        for engine in pool.engines
        if (host := engine.loop.scheduler.blocks.host) is not None
    ]
    if not tiers:
        return None
    return {
        "stored_blocks": sum([host.num_stored for host, _ in tiers]),
        "restored_blocks": sum([host.num_restored for host, _ in tiers]),
        "restored_tokens": sum([host.num_restored_tokens for host, _ in tiers]),
        "stored_bytes": sum([host.num_stored * size for host, size in tiers]),
        "restored_bytes": sum([host.num_restored * size for host, size in tiers]),
        **(cluster.tiers.summary() if cluster.tiers is not None else {}),
    }


def images_processed(cluster: Cluster, end_tick: int) -> dict[str, Any] | None:
    """Images that API servers took in, those that their caches had, the mean time of a request there until its images
    are done, and the busy share of processors' threads where it is highest."""
    threads = [front.images for front in cluster.fronts if front.images is not None]
    if not threads:
        return None
    ticks, requests = sum([one.ticks for one in threads]), sum([one.num_requests for one in threads])
    return {
        "images": sum([one.num_images for one in threads]),
        "cached": sum([one.num_cached for one in threads]),
        "mean_ms": ratio(ticks * 1e3, requests * TICKS_PER_S),
        "busy_share": max(ratio(one.busy_ticks, end_tick * one.num_processes) or 0.0 for one in threads),
    }


def encoder_busy_share(cluster: Cluster, end_tick: int) -> float:
    """Share of the time in which engines of encode pools have steps; 0 without."""
    pools = [pool for pool in cluster.pools if pool.spec.role == "encode"]
    engine_ticks = sum([len(pool.engines) * end_tick for pool in pools])
    return sum([pool.usage().busy_s for pool in pools]) * TICKS_PER_S / engine_ticks if engine_ticks else 0.0


def _engine_s(cluster: Cluster, pool: Pool, collector: Collector) -> float:
    fleet = None if cluster.dynamic is None else cluster.dynamic.fleet_of(pool)
    if fleet is None:
        return collector.end_tick / 1e12 * len(pool.engines)
    return fleet.used_s(collector.end_tick) * len(pool.replicas[0].ranks)


def _owned(cluster: Cluster) -> tuple[float, float] | None:
    """(USD per hour before electricity, idle watts) of all devices at their peak if they are owned; None without
    purchase prices."""
    price, usd, watts = cluster.scenario.price, 0.0, 0.0
    for pool in cluster.pools:
        device = pool.scenario.hardware
        hourly = None if price is None or price.owned is None else price.owned.usd_per_hour(device)
        if hourly is None:
            return None
        fleet = None if cluster.dynamic is None else cluster.dynamic.fleet_of(pool)
        per_replica = len(pool.replicas[0].ranks) * pool.devices_per_engine
        count = pool.num_devices if fleet is None else fleet.most_in_use * per_replica
        usd, watts = usd + count * hourly, watts + count * idle_power_w(device)
    return usd, watts


def _bill(
    cluster: Cluster, engine_s: Sequence[float], duration: float
) -> tuple[float | None, float | None, float | None]:
    """(average USD per hour, prompts' share of cost, of which cached tokens'); None without a price.

    A pool's cost is split by prompts' share of its step time (`PromptTime`); pools without steps as the others are."""
    hourly = billed = of_prompts = of_cached = 0.0
    for pool, seconds in zip(cluster.pools, engine_s, strict=True):
        price, time = usd_per_hour(pool.scenario.hardware, cluster.scenario.price), pool.backend.prompt_time
        if price is None:
            return None, None, None
        hourly += price * seconds / duration * pool.devices_per_engine
        if time.share is not None:
            cost = price * seconds * pool.devices_per_engine
            billed, of_prompts = billed + cost, of_prompts + cost * time.share
            of_cached += cost * time.cached_share
    return hourly, ratio(of_prompts, billed), ratio(of_cached, billed)


def usage_peak(pool: Pool, collector: Collector) -> float:
    """Largest share of its KV blocks that an engine of `pool` has used."""
    used = [collector.used_blocks_peak.get(engine.index, 0) for engine in pool.engines]
    return max(used) / pool.memory.num_kv_blocks


def _of_pool(cluster: Cluster, pool: Pool, engine_s: float, collector: Collector) -> dict[str, object]:
    usage, price = pool.usage(), usd_per_hour(pool.scenario.hardware, cluster.scenario.price)
    return {
        **({"name": pool.spec.name} if pool.spec.name is not None else {}),
        **({"deployment": pool.spec.deployment} if pool.spec.deployment is not None else {}),
        **({"model": pool.scenario.model.name} if pool.spec.model is not None else {}),
        "role": pool.spec.role,
        "replicas": pool.spec.replicas,
        "hardware": pool.scenario.hardware.name,
        "num_devices": pool.num_devices,
        "busy_share": ratio(usage.busy_s, engine_s),
        **({"pipeline_bubble_share": _bubble_share([pool])} if pool.pipelines else {}),
        "mfu": ratio(usage.peak_compute_s, engine_s),
        "mbu": ratio(usage.hbm_bytes / pool.scenario.hardware.memory_bandwidth, engine_s),
        "energy_j": pool.energy_j(engine_s),
        "mean_power_w": ratio(pool.energy_j(engine_s), engine_s * pool.devices_per_engine),
        "kv_cache_usage_peak": usage_peak(pool, collector),
        "preemptions": sum(engine.loop.scheduler.num_preemptions for engine in pool.engines),
        "engines": [pool.engines[0].index, len(pool.engines)],
        "usd_total": None if price is None else price * engine_s * pool.devices_per_engine / 3600,
        **_dynamics(cluster, pool, engine_s, collector),
    }


def _dynamics(cluster: Cluster, pool: Pool, engine_s: float, collector: Collector) -> dict[str, object]:
    """Figures of a pool that scales or takes a share of the requests."""
    dynamic = cluster.dynamic
    if dynamic is None:
        return {}
    row: dict[str, object] = {"gpu_hours": engine_s * pool.devices_per_engine / 3600}
    if (fleet := dynamic.fleet_of(pool)) is not None:
        row |= {"replicas_peak": fleet.most_in_use, "starts": fleet.num_started, "failures": fleet.num_failed}
        row["replicas_over_time"] = [[at / TICKS_PER_S, serving, in_use] for at, serving, in_use in fleet.counts]
        row["failed_at_s"] = [at / TICKS_PER_S for at in fleet.failed_at]
    engines = range(pool.engines[0].index, pool.engines[0].index + len(pool.engines))
    if pool.spec.shadow:
        return row | {"shadow": True, "completed": sum(dynamic.shadowed[index] for index in engines)}
    requests = collector.requests()
    is_here = (requests.replica >= engines.start) & (requests.replica < engines.stop)
    answered = requests.some(np.flatnonzero(is_here))
    return row | {"completed": len(answered), **request_latencies(answered)}


def kv_transferred(cluster: Cluster, duration: float) -> dict[str, float] | None:
    """Transfers between engines in `duration` seconds; None where KV stays where it is."""
    transfers = cluster.transfers
    if transfers is None:
        return None
    return {
        "transfers": transfers.num_transfers,
        **({"abandoned": transfers.num_abandoned} if cluster.dynamic is not None else {}),
        "bytes": transfers.num_bytes,
        "mean_ms": transfers.ticks / 1e9 / max(transfers.num_transfers, 1),
        "bytes_per_s": transfers.num_bytes / duration,
    }
