"""Fits of single published figures: the committed ones are what they say, and rows that a fit made give it back."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.messages.collective import CollectiveFit, CollectiveSizes, collective_seconds
from perfmodel.cost.kernel_models.overheads import load_overheads
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.recorded import fit_recorded_for_all
from perfmodel.evidence.fit.single_figures import OverheadRow, fit_overheads, read_overhead_rows
from perfmodel.specs import load_hardware

FIGURES = Path(__file__).parent / "figures" / "overheads.csv"


def test_the_published_figures_give_the_committed_fits_again(tmp_path: Path) -> None:
    fits, path = fit_recorded_for_all("overheads", FIGURES, tmp_path)
    assert path.name == "overheads.yaml"
    assert "--overheads" in fits.command
    committed, provenance = load_overheads(), {"source", "date", "command"}
    assert fits.model_dump(exclude=provenance) == committed.model_dump(exclude=provenance)
    assert fits.source == committed.source


def test_hops_are_what_two_more_ranks_add() -> None:
    """All-gathers of 8 kB: 8.31 us between two, 13.61 between four, whose ring has two steps more; the rest of 8.31
    is a launch, with which an all-to-all of 11.5 us through the host's memory leaves 5.8 for its hop."""
    fit = load_overheads().over_pcie
    assert fit.hop_s == pytest.approx((13.61e-6 - 8.31e-6) / 2)
    assert fit.hop_through_host_s == pytest.approx(11.5e-6 - (8.31e-6 - fit.hop_s), abs=1e-7)


def test_rows_that_a_fit_made_give_it_back() -> None:
    """Of other fractions and starts than today's."""
    device = DeviceFacts.of(load_hardware("rtx-pro-6000"))
    link = device.hardware.scale_up_link
    assert link is not None
    true = CollectiveFit(
        launch_s=4e-6,
        hop_s=2e-6,
        memory_touches=1.0,
        ramp_s=1e-8,
        low_latency_fraction=0.3,
        simple_fraction=0.7,
        simple_start_s=1.5e-5,
    )

    def row(ranks: int, sent: float) -> OverheadRow:
        sizes = CollectiveSizes.of("all_gather", np.array([ranks * sent]), np.array([float(ranks)]))
        seconds = float(collective_seconds(sizes, true, device, link).duration[0])
        return OverheadRow("all_gather_s", "rtx-pro-6000", "", ranks, sent, seconds, "")

    others = [each for each in read_overhead_rows(FIGURES) if each.figure != "all_gather_s"]
    made = [row(2, 8.0 * 4**power) for power in range(13)] + [row(4, 8.0)]
    found = fit_overheads(made + others, 38.0).over_pcie
    assert found.hop_s == pytest.approx(2e-6, rel=0.02)
    assert found.low_latency_fraction == pytest.approx(0.3, rel=0.05)
    assert found.simple_fraction == pytest.approx(0.7, rel=0.03)
    assert found.simple_start_s == pytest.approx(1.5e-5, rel=0.05)


def test_graphs_take_what_vllm_estimates_when_it_starts() -> None:
    """0.36 GiB for 16 sizes, 0.64 and 0.78 for 86 (51 with prompts, 35 of decodes), 0.75 for 102."""
    fits = load_overheads()
    for count, gigabytes in ((16, 0.387), (86, 0.69), (86, 0.84), (102, 0.80)):
        assert fits.graph_pool_bytes + count * fits.graph_bytes == pytest.approx(gigabytes * 1e9, rel=0.15)


def test_too_few_rows_and_other_tables_are_refused(tmp_path: Path) -> None:
    rows = read_overhead_rows(FIGURES)
    with pytest.raises(SpecError, match="got 3 rows of figure all_gather_s; a fit needs at least 8"):
        fit_overheads(rows[:3] + [row for row in rows if row.figure != "all_gather_s"], 38.0)
    with pytest.raises(SpecError, match="got 0 rows of figure eager_step_s"):
        fit_overheads([row for row in rows if row.figure != "eager_step_s"], 38.0)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(SpecError, match="is no table of single figures"):
        read_overhead_rows(tmp_path / "other.csv")
