"""What the devices of a simulated cluster did in all: energy, utilisation, blocks, by pool and together."""

__all__ = ["device_totals"]

from perfmodel.cost import Usage, usd_per_hour
from perfmodel.sim.cluster import Cluster
from perfmodel.sim.collector import Collector
from perfmodel.sim.disaggregated import DisaggregatedServer
from perfmodel.sim.pool import Pool
from perfmodel.sim.summary import DeviceTotals


def device_totals(cluster: Cluster, collector: Collector) -> DeviceTotals:
    """Totals of all devices. Each pool's timer has counted one device of each of its engines."""
    duration = collector.end_tick / 1e12
    usages = [pool.usage() for pool in cluster.pools]
    weights = [pool.devices_per_engine for pool in cluster.pools]
    whole = Usage()
    for usage, weight in zip(usages, weights, strict=True):
        whole.add(usage, weight)
    num_devices = sum(pool.num_devices for pool in cluster.pools)
    device_s = duration * num_devices
    bandwidth_s = sum(
        weight * usage.hbm_bytes / pool.scenario.hardware.memory_bandwidth
        for pool, usage, weight in zip(cluster.pools, usages, weights, strict=True)
    )
    schedulers = [engine.loop.scheduler for engine in cluster.engines]
    is_plain = len(cluster.pools) == 1
    server = cluster.disaggregated
    return DeviceTotals(
        num_devices=num_devices,
        num_preemptions=sum(s.num_preemptions for s in schedulers),
        prefix_tokens_asked=sum(s.num_prefix_tokens_asked for s in schedulers),
        prefix_tokens_hit=sum(s.num_prefix_tokens_hit for s in schedulers),
        energy_j=sum(pool.energy_j(duration) for pool in cluster.pools),
        mfu=whole.peak_compute_s / device_s,
        mbu=bandwidth_s / device_s,
        bound_share={bound: seconds / whole.busy_s for bound, seconds in whole.bound_s.items()},
        kv_cache_usage_peak=max(_usage_peak(pool, collector) for pool in cluster.pools),
        usd_per_hour=_usd_per_hour(cluster),
        num_rejected=cluster.gateway.num_rejected if cluster.gateway is not None else 0,
        num_retries=cluster.gateway.num_retries if cluster.gateway is not None else 0,
        pools=() if is_plain else tuple(_of_pool(pool, collector) for pool in cluster.pools),
        kv_transfer=_transfers(server, duration) if server is not None else None,
        kv_offload=_offloaded(cluster),
    )


def _offloaded(cluster: Cluster) -> dict[str, object] | None:
    """Blocks to and from the second tiers of all engines, and their bytes over the links of all devices."""
    tiers = [
        (host, pool.devices_per_engine * pool.restored_bytes_per_block)
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
    }


def _usd_per_hour(cluster: Cluster) -> float | None:
    """Of all devices; None if one of them has no price."""
    prices = [usd_per_hour(pool.scenario.hardware, cluster.scenario.price) for pool in cluster.pools]
    if any(price is None for price in prices):
        return None
    return sum((price or 0.0) * pool.num_devices for price, pool in zip(prices, cluster.pools, strict=True))


def _usage_peak(pool: Pool, collector: Collector) -> float:
    used = [collector.used_blocks_peak.get(engine.index, 0) for engine in pool.engines]
    return max(used) / pool.memory.num_kv_blocks


def _of_pool(pool: Pool, collector: Collector) -> dict[str, object]:
    duration, num_engines, usage = collector.end_tick / 1e12, len(pool.engines), pool.usage()
    engine_s = duration * num_engines
    return {
        "role": pool.spec.role,
        "replicas": pool.spec.replicas,
        "hardware": pool.scenario.hardware.name,
        "num_devices": pool.num_devices,
        "busy_share": usage.busy_s / engine_s,
        "mfu": usage.peak_compute_s / engine_s,
        "mbu": usage.hbm_bytes / pool.scenario.hardware.memory_bandwidth / engine_s,
        "kv_cache_usage_peak": _usage_peak(pool, collector),
        "preemptions": sum(engine.loop.scheduler.num_preemptions for engine in pool.engines),
    }


def _transfers(server: DisaggregatedServer, duration: float) -> dict[str, float]:
    transfers = server.transfers
    count = max(transfers.num_transfers, 1)
    return {
        "transfers": transfers.num_transfers,
        "bytes": transfers.num_bytes,
        "mean_ms": transfers.ticks / 1e9 / count,
        "bytes_per_s": transfers.num_bytes / duration,
    }
