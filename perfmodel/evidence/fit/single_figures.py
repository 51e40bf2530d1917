"""Fits single published figures from CSV files: expert-parallel exchanges, PCIe messages, eager steps, sampling, memory

Exchanges, a row per size and direction: device, exchange (dispatch or combine), ranks, payload_bytes (sent by a rank to
all), latency_us. All ranks share a switch; the inter-node start time is not determined and stays.

Others: figure, device, model, ranks, amount (bytes sent by a rank; graphs), value (SI units), source. By figure:

    all_gather_s               NCCL between devices that see each other's memory
    all_to_all_through_host_s  the smallest between two that do not
    bus_rate_through_host      of large all-reduces between such, as nccl-tests counts it
    peer_read_rate             of kernels that read their peer's memory
    eager_step_s               a decode step of one sequence, launched operator by operator
    sampled_sequence_s         time per further sequence of a step if the model asks for top-p
    graphs_bytes               vLLM's estimate for so many CUDA graphs
    communicator_bytes         memory per device besides tensors, with several devices"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.calibrations.for_all import ExchangeFits
from perfmodel.cost.kernel_models.device import DEFAULT_LINK, DeviceFacts
from perfmodel.cost.kernel_models.messages import collective
from perfmodel.cost.kernel_models.overheads import OverheadFits, OverPcieFit
from perfmodel.cost.steps.host import launching_calls
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.collectives import FEWEST_EXCHANGES
from perfmodel.evidence.fit.kernels import Floats, fit_form, fit_groups, within_ranges
from perfmodel.evidence.observation import MALFORMED, grouped
from perfmodel.evidence.sources.kernels import Group
from perfmodel.files.sandbox import read_rows
from perfmodel.models.cards import load_model
from perfmodel.ops import build_graph
from perfmodel.specs import load_hardware
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.networks import Link

RowT = TypeVar("RowT")


def read_exchanges(path: str | Path) -> list[Group]:
    """Exchanges of a table by direction and device. Raises SpecError if it is unreadable or lacks columns."""

    def row(cells: dict[str, str]) -> tuple[tuple[str, str], tuple[float, float]]:
        leaving_bytes = float(cells["payload_bytes"]) * (1 - 1 / int(cells["ranks"]))
        return (cells["exchange"], cells["device"]), (leaving_bytes, float(cells["latency_us"]) * 1e-6)

    result = []
    for (exchange, name), members in grouped(_read(path, row, "exchanges")).items():
        (leaving_bytes, seconds), rows = np.array(members).T, np.arange(len(members))
        sizes = collective.ExchangeSizes(leaving_bytes, 0.0 * seconds, *np.ones((3, len(rows))))
        result.append(Group("", "", exchange, DeviceFacts.of(load_hardware(name)), sizes, seconds, rows))
    return result


def _read(path: str | Path, row: Callable[[dict[str, str]], RowT], what: str) -> list[RowT]:
    try:
        return [row(cells) for cells in read_rows(Path(path))]
    except (OSError, *MALFORMED) as error:
        raise SpecError(f"{path}: is no table of {what}: {str(error).splitlines()[0]}.") from None


def fit_exchanges(groups: Sequence[Group], begin: ExchangeFits) -> ExchangeFits:
    """`begin` fitted to the rows of each direction. Raises SpecError for a direction with too few."""
    result = {}
    for exchange in ("dispatch", "combine"):
        members = [group for group in groups if group.key == exchange]
        if (count := sum(len(group.rows) for group in members)) < FEWEST_EXCHANGES:
            needed = f"a fit needs at least {FEWEST_EXCHANGES} of each"
            raise SpecError(f"got {count} rows of exchange {exchange}; {needed}.")
        free = ("floor_s", "start_s", "link_fraction")
        result[exchange] = fit_groups(members, getattr(begin, exchange), free=free)
    return begin.model_copy(update=result)


_FREE_OVER_PCIE = ("low_latency_fraction", "simple_fraction", "simple_start_s")
_HOST_WITH_GRAPHS_S = 1e-3  # of a step, what an engine's host takes beside launches
_FEWEST_SIZES = 8  # of the all-gather, twice the parameters


class OverheadRow(NamedTuple):
    """One published figure."""

    figure: str
    device: str
    model: str
    ranks: int
    amount: float
    value: float
    source: str

    @property
    def link_share(self) -> float:
        """The value, a rate, over the link's."""
        return self.value / _link(self.device).bandwidth_bytes_per_s


def read_overhead_rows(path: str | Path) -> list[OverheadRow]:
    """Rows of a table. Raises SpecError if it is unreadable or lacks columns."""

    def row(cells: dict[str, str]) -> OverheadRow:
        figure, device, model, source = (cells[name] for name in ("figure", "device", "model", "source"))
        amount, value = float(cells["amount"] or 0.0), float(cells["value"])
        return OverheadRow(figure, device, model, int(cells["ranks"]), amount, value, source)

    return _read(path, row, "single figures")


def fit_overheads(rows: Sequence[OverheadRow], softmax_ops: float) -> OverheadFits:
    """Fits to two digits, as figures have; `softmax_ops`: see `fit_softmax`. Raises SpecError for a missing kind."""
    launches = []  # what is left of a step for each call that launches kernels
    for row in _of("eager_step_s", rows):
        graph = build_graph(load_model(row.model), EngineSpec(enforce_eager=True), sampling="greedy")
        launches.append((row.value - _HOST_WITH_GRAPHS_S) / launching_calls(graph))
    sampled = [
        row.value * DeviceFacts.of(load_hardware(row.device)).bandwidth / load_model(row.model).vocab_size
        for row in _of("sampled_sequence_s", rows)
    ]
    # bytes of all graphs together, and of each: the line that is off by the least share of the estimates
    graphs = _of("graphs_bytes", rows, fewest=3)
    counts, values = np.array([row.amount for row in graphs]), np.array([row.value for row in graphs])
    (pool, item), *_ = np.linalg.lstsq(np.stack([1 / values, counts / values], axis=1), np.ones(len(graphs)))
    return OverheadFits(
        over_pcie=_over_pcie(rows),
        engine_launch_s=_mean(launches),
        sampling_bytes_per_logit=_rounded(float(np.median(sampled))),
        graph_pool_bytes=_rounded(float(pool)),
        graph_bytes=_rounded(float(item)),
        communicator_bytes=_mean([row.value for row in _of("communicator_bytes", rows)]),
        softmax_ops=softmax_ops,
    )


def _of(figure: str, rows: Sequence[OverheadRow], fewest: int = 1) -> list[OverheadRow]:
    result = [row for row in rows if row.figure == figure]
    if len(result) < fewest:
        raise SpecError(f"got {len(result)} rows of figure {figure}; a fit needs at least {fewest}.")
    return result


def _over_pcie(rows: Sequence[OverheadRow]) -> OverPcieFit:
    """NCCL's all-gather between two devices, each byte touched once; the smallest is a launch and a hop."""
    gathers = _of("all_gather_s", rows)
    pairs, others = ([row for row in gathers if (row.ranks == 2) == is_pair] for is_pair in (True, False))
    pairs = _of("all_gather_s", pairs, _FEWEST_SIZES)
    (more, *_), least = _of("all_gather_s", others), min(pairs, key=lambda row: row.amount)
    hop_s = (more.value - least.value) / (more.ranks - least.ranks)  # k - 1 steps between k ranks
    link, device = _link(pairs[0].device), DeviceFacts.of(load_hardware(pairs[0].device))
    payload = np.array([row.ranks * row.amount for row in pairs])
    sizes = collective.CollectiveSizes.of("all_gather", payload, np.full(len(pairs), 2.0))

    def seconds(fit: collective.CollectiveFit, chosen: NDArray[np.int64]) -> Floats:
        some = collective.CollectiveSizes(*(np.broadcast_to(item, payload.shape)[chosen] for item in sizes))
        return np.asarray(collective.collective_seconds(some, fit, device, link).duration, dtype=np.float64)

    values = {"launch_s": least.value - hop_s, "hop_s": hop_s, "memory_touches": 1.0}
    begin = within_ranges(collective.CollectiveFit, {**values, "simple_fraction": 0.6, "ramp_s": 1e-8})
    direct = fit_form(seconds, begin, np.array([row.value for row in pairs]), free=_FREE_OVER_PCIE)
    return OverPcieFit(
        hop_s=_rounded(hop_s, 3),
        hop_through_host_s=_rounded(_of("all_to_all_through_host_s", rows)[0].value - direct.launch_s),
        low_latency_fraction=_rounded(direct.low_latency_fraction),
        simple_fraction=_rounded(direct.simple_fraction),
        simple_start_s=_rounded(direct.simple_start_s),
        through_host_fraction=_mean([row.link_share for row in _of("bus_rate_through_host", rows)]),
        kernels_fraction=_mean([row.link_share for row in _of("peer_read_rate", rows)]),
    )


def _link(device: str) -> Link:
    return load_hardware(device).scale_up_link or DEFAULT_LINK


def _mean(values: Sequence[float]) -> float:
    """Geometric mean."""
    return _rounded(float(np.exp(np.mean(np.log(values)))))


def _rounded(value: float, digits: int = 2) -> float:
    return float(f"{value:.{digits}g}")
