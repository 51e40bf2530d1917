"""Measured collectives (`nccl`, `custom_allreduce`): kernels, sizes and fits.

Columns: op_name, num_gpus, message_size in ELEMENTS of nccl_dtype or allreduce_dtype, kernel_source, engine_version.
NCCL's rows serve all engines; its versions are fitted together. Eagerly launched all-reduces include the host's launch,
which CUDA graphs avoid: they are a separate family.

DeepEP's kernels (`wideep_deepep_normal`, `wideep_deepep_ll`): node_num of eight devices each [assumed of GB200],
num_token, hidden_size, num_topk, num_experts, SMs, and microseconds of dispatch (FP8 with a scale for each 128
numbers) and of combine (BF16), which `read_table` makes rows of. Normal ones reach experts on at most four nodes
(DeepEP, test_internode.py). All devices have one fit for each kernel and direction. Rows of normal kernels on
eight nodes are left out of it: 17 GB/s of a card, where DeepEP reports 51."""

from collections.abc import Iterable

import numpy as np

from perfmodel.cost.kernel_models.device import DeviceFacts
from perfmodel.cost.kernel_models.fits import Residuals
from perfmodel.cost.kernel_models.messages.collective import (
    CollectiveFit,
    CollectiveSizes,
    CustomAllReduceFit,
    ExchangeFit,
    ExchangeSizes,
)
from perfmodel.cost.kernel_models.messages.links import link_for
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.kernels import Groups, KernelModule, fit_groups, search_of, seconds_of, with_residuals
from perfmodel.evidence.sources.kernels import Group, KernelTable, engine_and_version, format_bytes, numbers
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.messages import Exchange, Message, Route, Spread, distinct_ranks
from perfmodel.specs import load_hardware
from perfmodel.specs.architectures import find_architecture

_KINDS = {"alltoall": "all_to_all"}
_FREE_BEYOND = ("simple_start_s", "simple_fraction")
# What stays at its default over switches: sizes that no fit has seen were predicted as well without, or better.
_SWITCHED = {"first_channel", "simple_start_s", "two_shot_fraction", "sync_s"}
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
        names, begins = search_of("collective")
        return fit_groups(groups, nccl, free=free(*names), starts=begins)
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
        names, begins = search_of("custom_all_reduce")
        own = names if floor is None else ("eager_floor_s", *names[2:])
        result = fit_groups(small, result, free=free(*own), starts=begins)
    return with_residuals(result, groups)


COLLECTIVES = KernelModule(_groups, _fit)

DEEPEP: dict[str, Route] = {"wideep_deepep_normal": "node", "wideep_deepep_ll": "expert"}
_ELEMENT_BYTES = {"dispatch": 1 + 4 / 128, "combine": 2.0}
_PER_NODE = 8
_MAX_NODES = {"node": 4, "expert": 8}  # of rows that are fitted
_FREE_EXCHANGE = ("start_s", "doubling_s", "link_fraction", "network_fraction")
FEWEST_EXCHANGES = 6  # rows of a direction, as many as parameters at most
_BEGIN = ExchangeFit(start_s=2e-5, doubling_s=1e-5, link_fraction=0.6, network_fraction=0.9)


def _exchange_groups(table: KernelTable, device: DeviceFacts) -> list[Group]:
    """Groups: DeepEP's kernels by engine version and direction."""
    result = []
    for (called, exchange), rows in table.groups(("engine_version", "exchange")):
        engine, version = engine_and_version(called)
        route, part = DEEPEP[table.op], table.take(rows)
        names = ("node_num", "num_token", "hidden_size", "num_topk", "num_experts", "units")
        columns = zip(*(numbers(part, name).tolist() for name in names), strict=True)
        sizes = [_exchange_sizes(route, _ELEMENT_BYTES[exchange], *map(int, row)) for row in columns]
        joint = ExchangeSizes(*(np.array(column, dtype=np.float64) for column in zip(*sizes, strict=True)))
        key = f"collective/{exchange}_{route}"
        result.append(Group(engine, version, key, device, joint, part.seconds, rows))
    return result


def _exchange_sizes(
    route: Route, element_bytes: float, nodes: int, tokens: int, width: int, top_k: int, experts: int, units: int
) -> ExchangeSizes:
    ranks, groups = nodes * _PER_NODE, nodes if route == "node" and experts % nodes == 0 else 1
    ffn = MoEFFN(experts, top_k, width, num_groups=groups, top_k_groups=min(groups, 4))
    once = tokens * width * element_bytes
    message = Message("all_to_all", once * distinct_ranks(ffn, ranks), ranks, exchange=Exchange(ffn, once, route))
    return ExchangeSizes.of(message, Spread(ranks, nodes, _PER_NODE, _PER_NODE, float(nodes > 1)), units)[0]


def _fit_exchange(groups: Groups) -> ExchangeFit:
    route = groups[0].key.rpartition("_")[2]
    groups = [group.take(group.sizes.nodes <= _MAX_NODES[route]) for group in groups]
    if (count := len(seconds_of(groups))) < FEWEST_EXCHANGES:
        what = f"{groups[0].key.partition('/')[2]} on up to {_MAX_NODES[route]} nodes"
        raise SpecError(f"got {count} rows of {what}; a fit needs at least {FEWEST_EXCHANGES} of each.")
    is_normal = route == "node"
    begin = _BEGIN.model_copy(update={"unit_bytes_per_s": 1.2e10}) if is_normal else _BEGIN
    return fit_groups(groups, begin, free=_FREE_EXCHANGE + (("unit_bytes_per_s", "forward") if is_normal else ()))


EXCHANGES = KernelModule(_exchange_groups, _fit_exchange)


def fit_deepep(tables: Iterable[KernelTable]) -> dict[str, ExchangeFit]:
    """One fit for each of DeepEP's kernels and directions, of all tables. tables: of `DEEPEP`. Raises SpecError for too
    few rows of one."""
    groups: dict[str, list[Group]] = {}
    for table in tables:
        for group in _exchange_groups(table, DeviceFacts.of(load_hardware(table.system))):
            groups.setdefault(group.key.partition("/")[2], []).append(group)
    return {name: _fit_exchange(members) for name, members in sorted(groups.items())}
