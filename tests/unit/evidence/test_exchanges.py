"""Fits of expert parallelism's exchanges: they find what made the rows, and what DeepEP's figures say between nodes."""

import csv
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.calibrations.for_all import load_exchange_fits
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.messages.collective import (
    ExchangeFit,
    ExchangeSizes,
    exchange_seconds,
    exchange_time,
)
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.recorded import fit_recorded_for_all
from perfmodel.evidence.fit.single_figures import fit_exchanges, read_exchanges
from perfmodel.evidence.kinds.operators import validate_operators
from perfmodel.models.architecture import MoEFFN
from perfmodel.ops.collectives import all_to_all
from perfmodel.ops.messages import Exchange, Message, RankGroup, Spread, distinct_ranks
from perfmodel.specs import load_hardware

TRUE = ExchangeFit(floor_s=2.5e-5, start_s=1.1e-5, link_fraction=0.6)
RACK = DeviceFacts.of(load_hardware("gb200"))
SIZES = [(ranks, payload) for ranks in (8, 16, 64) for payload in (1e4, 1e6, 1e7, 1e8, 4e8)]


def table(folder: Path, sizes: list[tuple[int, float]] = SIZES) -> Path:
    path = folder / "exchanges.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["device", "exchange", "ranks", "payload_bytes", "latency_us"])
        for exchange, factor in (("dispatch", 1.0), ("combine", 1.5)):
            for ranks, payload in sizes:
                seconds = exchange_time(all_to_all(payload, ranks), TRUE, RACK).duration_s
                writer.writerow(["gb200", exchange, ranks, payload, factor * seconds * 1e6])
    return path


def test_the_fit_finds_what_made_the_rows_and_keeps_the_start_between_nodes(tmp_path: Path) -> None:
    fits = fit_exchanges(read_exchanges(table(tmp_path)), load_exchange_fits())
    for name in ("floor_s", "start_s"):
        assert getattr(fits.dispatch, name) == pytest.approx(getattr(TRUE, name), rel=0.02)
        assert getattr(fits.combine, name) == pytest.approx(1.5 * getattr(TRUE, name), rel=0.02)
    assert fits.dispatch.link_fraction == pytest.approx(TRUE.link_fraction, rel=0.02)
    assert fits.combine.residuals.num_rows == len(SIZES)
    assert fits.dispatch.between_nodes_s == load_exchange_fits().dispatch.between_nodes_s


def test_what_is_written_reads_back_and_too_few_rows_are_refused(tmp_path: Path) -> None:
    fits, path = fit_recorded_for_all("exchange", table(tmp_path), tmp_path / "out")
    assert path.name == "exchange.yaml"
    assert "--exchange" in path.read_text(encoding="utf-8")
    assert fits.dispatch.link_fraction != load_exchange_fits().dispatch.link_fraction
    with pytest.raises(SpecError, match="got 2 rows of exchange dispatch"):
        fit_recorded_for_all("exchange", table(tmp_path, SIZES[:2]), tmp_path / "other")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SpecError, match="is no table of exchanges"):
        read_exchanges(tmp_path / "other.csv")


# DeepEP README (MIT), low-latency kernels on H800 with 400 Gbit/s cards: 128 tokens of 7168 on each rank, 8 of 256
# experts, FP8 with a scale for each 128 numbers out, BF16 back. Ranks: microseconds of dispatch and of combine.
BETWEEN_NODES = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}


def test_deepeps_figures_give_the_start_between_nodes_again() -> None:
    """The start with the least squares of log errors over all ten figures, the bytes at the card's rate."""
    fits, ffn = load_exchange_fits(), MoEFFN(256, 8, 2048)
    device = DeviceFacts.of(
        load_hardware("h100-sxm-80gb", ["hardware.nvlink.bandwidth=200 GB/s", "hardware.network.link=infiniband-ndr"])
    )

    def squares(start_s: float) -> float:
        total = 0.0
        for ranks, measured in BETWEEN_NODES.items():
            kernels = (("dispatch", 1 + 4 / 128, fits.dispatch), ("combine", 2.0, fits.combine))
            for (kernel, element_bytes, fit), us in zip(kernels, measured, strict=True):
                one = 128 * 7168 * element_bytes
                group = RankGroup("expert", 1, 1, ranks)
                exchange = Exchange(ffn, one, "expert")
                work = all_to_all(one * distinct_ranks(ffn, ranks), group, kernel, kernel, exchange)
                found = exchange_time(work, fit.model_copy(update={"between_nodes_s": start_s}), device)
                total += float(np.log(found.duration_s * 1e6 / us)) ** 2
        return total

    starts = np.arange(20e-6, 80e-6, 1e-6)
    best = float(starts[np.argmin([squares(start) for start in starts])])
    assert best == pytest.approx(fits.dispatch.between_nodes_s, abs=5e-6)
    assert fits.combine.between_nodes_s == fits.dispatch.between_nodes_s


MADE = {
    "node": ExchangeFit(
        start_s=3e-5,
        doubling_s=2e-5,
        link_fraction=0.55,
        network_fraction=0.85,
        unit_bytes_per_s=1.3e10,
        forward=1.5,
    ),
    "expert": ExchangeFit(start_s=1.5e-5, doubling_s=5e-6, link_fraction=0.5, network_fraction=0.9),
}
TABLES = {"node": "wideep_deepep_normal", "expert": "wideep_deepep_ll"}


def deepep_tables(folder: Path) -> Path:
    """Tables as aiconfigurator has them, of an H100 whose kernels are those of `MADE`; combine takes the same time."""
    device = DeviceFacts.of(load_hardware("h100-sxm-80gb"))
    for route, fit in MADE.items():
        path = folder / "h100_sxm" / f"{TABLES[route]}.csv"
        path.parent.mkdir(exist_ok=True, parents=True)
        shared = ["engine_version", "node_num", "num_token", "hidden_size", "num_topk", "num_experts"]
        parts = ("transmit", "notify") if route == "node" else ("avg_t",)
        times = [f"{exchange}_{part}_us" for exchange in ("dispatch", "combine") for part in parts]
        units = ["dispatch_sms", "combine_sms"] if route == "node" else []
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*shared, *times, *units])
            for nodes in (1, 2, 4):
                for tokens in (1, 16, 128, 1024, 8192):
                    for sms in (4, 12, 24) if route == "node" else (0,):
                        row = ["sglang 0.5.12", nodes, tokens, 4096, 8, 256]
                        for element_bytes in (1 + 4 / 128, 2.0):
                            ffn, ranks, once = MoEFFN(256, 8, 1), 8 * nodes, tokens * 4096 * element_bytes
                            exchange = Exchange(ffn, once, route)
                            payload = once * distinct_ranks(ffn, ranks)
                            message = Message("all_to_all", payload, ranks, None, exchange)
                            (sizes,) = ExchangeSizes.of(message, Spread(ranks, nodes, 8, 8, 1.0), sms)
                            us = float(exchange_seconds(sizes, fit, device).duration) * 1e6
                            row += [us - 3.0, 3.0] if route == "node" else [us]
                        writer.writerow([*row, *([sms, sms] if units else [])])
    return folder


def test_deepeps_tables_give_their_kernels_again(tmp_path: Path) -> None:
    """Both directions of a row, notice and transmission of normal ones together; each constant within 5 %."""
    fits, _ = fit_recorded_for_all("exchange", deepep_tables(tmp_path), tmp_path / "out")
    for route, made in MADE.items():
        for exchange in ("dispatch", "combine"):
            fit = getattr(fits, f"{exchange}_{route}")
            assert fit.residuals.num_rows == (45 if route == "node" else 15)
            more = ["unit_bytes_per_s", "forward"] if route == "node" else ["link_fraction"]
            for name in ("start_s", "doubling_s", "network_fraction", *more):
                assert getattr(fit, name) == pytest.approx(getattr(made, name), rel=0.05), (route, exchange, name)
    assert fits.dispatch == load_exchange_fits().dispatch
    with pytest.raises(SpecError, match="has no tables wideep_deepep_normal or wideep_deepep_ll"):
        fit_recorded_for_all("exchange", tmp_path / "out", tmp_path / "other")


@pytest.mark.parametrize(
    ("columns", "cells", "sentence"),
    [
        ("node_num,dispatch_avg_t_us,combine_avg_t_us", "16,5,3", "got 0 rows of combine_expert on up to 8 nodes"),
        ("node_num,dispatch_avg_t_us,combine_avg_t_us", "2,5,3", "got 1 rows of combine_expert on up to 8 nodes"),
        ("node_num,dispatch_avg_t_us,combine_avg_t_us", "2,x,3", "its rows cannot be understood: could not convert"),
        ("node_num,dispatch_sms,combine_sms", "2,5,3", "no row has a latency_ms above 0"),
        ("node_num,dispatch_avg_t_us", "2,5", "has no column latency_ms"),
    ],
)
def test_tables_that_say_too_little_of_deepep_are_refused(
    tmp_path: Path, columns: str, cells: str, sentence: str
) -> None:
    file = tmp_path / "h100_sxm" / "wideep_deepep_ll.csv"
    file.parent.mkdir()
    head = "engine_version,num_token,hidden_size,num_topk,num_experts"
    file.write_text(f"{head},{columns}\nvllm 0.14,4,7168,8,256,{cells}\n")
    with pytest.raises(SpecError, match=sentence):
        fit_recorded_for_all("exchange", tmp_path, tmp_path / "out")


def test_deepeps_tables_are_compared_row_by_row(tmp_path: Path) -> None:
    """A dispatch and a combine for each row of the tables, none left out."""
    report = validate_operators(deepep_tables(tmp_path), is_full=True)
    assert report.rows == report.covered == 2 * (45 + 15)
    assert {name for name in report.by if name.startswith("format ")} == {
        f"format {exchange}_{route}" for exchange in ("dispatch", "combine") for route in MADE
    }
