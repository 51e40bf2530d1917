"""Measured collectives (`nccl`, `custom_allreduce`): which kernel a row ran, its sizes, and the fit of its form.

Columns: op_name, num_gpus, message_size in ELEMENTS of nccl_dtype or allreduce_dtype, kernel_source, engine_version.
NCCL's rows belong to all engines; versions of it are fitted together. Rows of an engine's all-reduce that were launched
eagerly contain the host's launch, which serving from CUDA graphs does not pay: they are a family of their own.
"""

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.messages.collective import CustomAllReduceFit, custom_seconds
from perfmodel.cost.forms.messages.links import link_for
from perfmodel.cost.forms.messages.nccl import CollectiveFit, CollectiveSizes, collective_seconds
from perfmodel.evidence.fit.forms import fit_form, predictor, residuals_of
from perfmodel.evidence.sources.kernels import Group, KernelTable, engine_name, format_bytes, numbers
from perfmodel.specs.architectures import find_architecture
from perfmodel.specs.networks import Link

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

OPS = ("nccl", "custom_allreduce")

_KINDS = {"alltoall": "all_to_all"}
_FREE = (
    "launch_s",
    "hop_s",
    "first_channel",
    "ramp_s",
    "low_latency_fraction",
    "simple_start_s",
    "simple_fraction",
    "memory_touches",
)
_FREE_BEYOND = ("simple_start_s", "simple_fraction", "memory_touches")
_FREE_CUSTOM = ("launch_s", "peer_s", "one_shot_fraction", "two_shot_fraction", "sync_s")
_STARTS: tuple[dict[str, float], ...] = ({}, {"first_channel": 0.05, "ramp_s": 5e-6}, {"low_latency_fraction": 0.5})
_NO_ROWS = 3  # fewer rows than this say nothing about a part of the form


def _dtype(table: KernelTable) -> str:
    return "nccl_dtype" if "nccl_dtype" in table.columns else "allreduce_dtype"


def _kinds(table: KernelTable) -> list[str]:
    return [_KINDS.get(name, name) for name in table["op_name"].astype(str)]


def sizes_of(table: KernelTable, kind: str) -> CollectiveSizes:
    """The sizes of rows of one kind; switches add floating point only."""
    name = _dtype(table)
    payload = numbers(table, "message_size") * format_bytes(table, name)
    is_float = np.array([not item.startswith(("int", "uint")) for item in table[name].astype(str)])
    return CollectiveSizes.of(kind, payload, numbers(table, "num_gpus"), is_float.astype(np.float64))


def is_too_fast(table: KernelTable, device: DeviceFacts) -> NDArray[np.bool_]:
    """Rows that would need more than the declared link: even a switch that adds needs every byte in once."""
    payload = numbers(table, "message_size") * format_bytes(table, _dtype(table))
    ranks = numbers(table, "num_gpus")
    return np.asarray(table.seconds < payload * (ranks - 1) / ranks / device.link_bandwidth)


def groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """One group per kind of collective for NCCL, one per engine and way of launching for custom all-reduces."""
    usable = np.flatnonzero(~is_too_fast(table, device))
    part = table.take(usable)
    source = part["kernel_source"].astype(str)
    is_nccl = part.op == "nccl"
    engines = ["nccl" if is_nccl else engine_name(str(version)) for version in part["engine_version"]]
    launch = ["eager" if name.endswith("eager") else "" for name in source]
    columns = {**part.columns, "kind": np.array(_kinds(part)), "engine": np.array(engines), "launch": np.array(launch)}
    result = []
    for (engine, kind, how), rows in KernelTable(part.system, part.op, columns).groups(("engine", "kind", "launch")):
        key = f"collective{'_eager' if how else ''}/{kind}{'/nccl' if is_nccl else ''}"
        one = part.take(rows)
        result.append(Group(engine, key, sizes_of(one, kind), one.seconds, usable[rows]))
    return result


def fit(group: Group, device: DeviceFacts) -> CollectiveFit | CustomAllReduceFit:
    """The parameters of one collective; of a custom all-reduce those of its kernels, then of what follows them."""
    link = _link(device)
    if group.key.endswith("/nccl"):
        result: CollectiveFit | CustomAllReduceFit = _fit_nccl(group, _start(device), _FREE, device)
    else:
        floor = 3e-5 if group.key.startswith("collective_eager") else None
        start = CustomAllReduceFit(beyond=_start(device), link_latency_s=link.latency_s or None, eager_floor_s=floor)
        is_small = group.sizes.payload <= start.most_bytes
        large, small = group.take(~is_small), group.take(is_small)
        if len(large.seconds) > _NO_ROWS:
            beyond = _fit_nccl(large, start.beyond, _FREE_BEYOND, device)
            start = start.model_copy(update={"beyond": beyond})
        result = _fit_custom(small, start, device) if len(small.seconds) > _NO_ROWS else start
    return result.model_copy(update={"residuals": residuals_of(predict(group, result, device), group.seconds)})


def _fit_nccl(group: Group, start: CollectiveFit, free: tuple[str, ...], device: DeviceFacts) -> CollectiveFit:
    starts = _STARTS if free == _FREE else ({},)
    return fit_form(predictor(group, _nccl, device), start, group.seconds, free=free, starts=starts)


def _fit_custom(group: Group, start: CustomAllReduceFit, device: DeviceFacts) -> CustomAllReduceFit:
    free = _FREE_CUSTOM if start.eager_floor_s is None else ("eager_floor_s", *_FREE_CUSTOM[2:])
    starts: tuple[dict[str, float], ...] = ({}, {"one_shot_fraction": 0.2})
    return fit_form(predictor(group, _custom, device), start, group.seconds, free=free, starts=starts)


def predict(group: Group, fit: CollectiveFit | CustomAllReduceFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    if isinstance(fit, CustomAllReduceFit):
        return _custom(group.sizes, fit, device)
    return _nccl(group.sizes, fit, device)


def _nccl(sizes: CollectiveSizes, fit: CollectiveFit, device: DeviceFacts) -> Floats:
    return np.asarray(collective_seconds(sizes, fit, device, _link(device)).duration)


def _custom(sizes: CollectiveSizes, fit: CustomAllReduceFit, device: DeviceFacts) -> Floats:
    return np.asarray(custom_seconds(sizes, fit, device, _link(device)).duration)


def _start(device: DeviceFacts) -> CollectiveFit:
    architecture = find_architecture(device.hardware.declared.architecture)
    return CollectiveFit(switch_ranks=architecture.switch_ranks, link_latency_s=_link(device).latency_s or None)


def _link(device: DeviceFacts) -> Link:
    """All measured groups are within one scale-up domain."""
    return link_for(device.hardware, 2)
