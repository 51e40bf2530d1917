"""Measured collectives (`nccl`, `custom_allreduce`): kernels, sizes and fits.

Columns: op_name, num_gpus, message_size in ELEMENTS of nccl_dtype or allreduce_dtype, kernel_source, engine_version.
NCCL's rows serve all engines; its versions are fitted together. Eagerly launched all-reduces include the host's launch,
which CUDA graphs avoid: they are a separate family."""

import numpy as np

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, CollectiveSizes, CustomAllReduceFit
from perfmodel.cost.kernel_models.messages.links import link_for
from perfmodel.evidence.fit.kernels import Groups, KernelModule, fit_groups, seconds_of, with_residuals
from perfmodel.evidence.sources.kernels import Group, KernelTable, engine_and_version, format_bytes, numbers
from perfmodel.specs.architectures import find_architecture

_KINDS = {"alltoall": "all_to_all"}
_FREE_BEYOND = ("simple_start_s", "simple_fraction")
_FREE = ("launch_s", "hop_s", "first_channel", "ramp_s", "low_latency_fraction", "memory_touches", *_FREE_BEYOND)
_FREE_CUSTOM = ("launch_s", "peer_s", "one_shot_fraction", "two_shot_fraction", "sync_s")
# What stays at its default over switches: sizes that no fit has seen were predicted as well without, or better.
_SWITCHED = {"first_channel", "simple_start_s", "two_shot_fraction", "sync_s"}
_STARTS: tuple[dict[str, float], ...] = ({}, {"first_channel": 0.05, "ramp_s": 5e-6}, {"low_latency_fraction": 0.5})
_STARTS_CUSTOM: tuple[dict[str, float], ...] = ({}, {"one_shot_fraction": 0.2})
_NO_ROWS = 3  # fewer rows do not determine a part of the kernel model
_EAGER_FLOOR_S = 3e-5


def _groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """Groups: NCCL by collective; custom all-reduces by engine and launch mode. Rows faster than the declared link are
    dropped: even an in-network reduction must receive every byte once."""
    is_nccl, dtype = table.op == "nccl", "nccl_dtype" if "nccl_dtype" in table.columns else "allreduce_dtype"
    payload, ranks = numbers(table, "message_size") * format_bytes(table, dtype), numbers(table, "num_gpus")
    usable = np.flatnonzero(table.seconds >= payload * (ranks - 1) / ranks / device.link_bandwidth)
    part = table.take(usable)
    columns = {
        **part.columns,
        "kind": np.array([_KINDS.get(name, name) for name in part["op_name"].astype(str)]),
        "launch": np.array(["_eager" if name.endswith("eager") else "" for name in part["kernel_source"].astype(str)]),
    }
    is_float = np.array([not name.startswith(("int", "uint")) for name in part[dtype].astype(str)]).astype(np.float64)
    result = []
    parts = KernelTable(part.system, part.op, columns).groups(("engine_version", "kind", "launch"))
    for (called, kind, how), rows in parts:
        engine, version = engine_and_version(called)
        # switches add floating point only
        sizes = CollectiveSizes.of(kind, payload[usable][rows], ranks[usable][rows], is_float[rows])
        key = f"collective{how}/{kind}{'/nccl' if is_nccl else ''}"
        result.append(
            Group("nccl" if is_nccl else engine, version, key, device, sizes, part.seconds[rows], usable[rows])
        )
    return result


def _fit(groups: Groups) -> CollectiveFit | CustomAllReduceFit:
    """Fit of one collective; custom all-reduces: the kernels, then what follows them."""
    key, hardware = groups[0].key, groups[0].device.hardware
    latency_s = link_for(hardware, 2).latency_s or None
    switch_ranks = find_architecture(hardware.declared.architecture).switch_ranks
    has_switch = link_for(hardware, 2).has_switch

    def free(*names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name not in _SWITCHED) if has_switch else (*names, "left_per_doubling")

    nccl = CollectiveFit(switch_ranks=switch_ranks, link_latency_s=latency_s)
    if key.endswith("/nccl"):
        return fit_groups(groups, nccl, free=free(*_FREE), starts=_STARTS)
    floor = _EAGER_FLOOR_S if key.startswith("collective_eager") else None
    result = CustomAllReduceFit(beyond=nccl, link_latency_s=latency_s, eager_floor_s=floor)
    small, large = (
        [group.take((group.sizes.payload <= result.most_bytes) == is_small) for group in groups]
        for is_small in (True, False)
    )
    if len(seconds_of(large)) > _NO_ROWS:
        beyond = fit_groups(large, nccl, free=free(*_FREE_BEYOND)).model_copy(update={"residuals": Residuals()})
        result = result.model_copy(update={"beyond": beyond})
    if len(seconds_of(small)) > _NO_ROWS:
        own = _FREE_CUSTOM if floor is None else ("eager_floor_s", *_FREE_CUSTOM[2:])
        result = fit_groups(small, result, free=free(*own), starts=_STARTS_CUSTOM)
    return with_residuals(result, groups)


COLLECTIVES = KernelModule(_groups, _fit)
