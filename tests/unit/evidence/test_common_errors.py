"""What calls of a kernel in one run err alike by: of rows with known parts, and of the committed tables."""

from pathlib import Path

import numpy as np
import pytest

from perfmodel.cost.calibrations.for_all import KernelErrors, load_kernel_errors
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.systems import common_share, fit_kernel_errors

MEASURED = Path(__file__).resolve().parents[3] / "measurements" / "operators"


@pytest.mark.parametrize(("of_shapes", "of_sizes"), [(0.1, 0.1), (0.03, 0.1), (0.2, 0.05)])
def test_the_part_of_shapes_is_found_in_rows_made_of_both(of_shapes: float, of_sizes: float) -> None:
    rng = np.random.default_rng(3)
    shapes = np.repeat(np.arange(400), 12)
    residuals = rng.normal(0, of_shapes, 400)[shapes] + rng.normal(0, of_sizes, len(shapes))
    true = of_shapes / (of_shapes**2 + of_sizes**2) ** 0.5
    assert common_share(residuals, shapes) == pytest.approx(true, abs=0.04)


def test_rows_that_have_nothing_of_their_shape_share_nothing() -> None:
    """Means of eight sizes scatter, too; what they scatter by is no error of shapes."""
    rng = np.random.default_rng(4)
    shapes = np.repeat(np.arange(300), 8)
    assert common_share(rng.normal(0, 0.1, len(shapes)), shapes) < 0.12
    assert common_share(np.repeat(rng.normal(0, 0.1, 300), 8), shapes) == pytest.approx(1)


@pytest.mark.release
def test_the_committed_tables_give_about_the_committed_shares(tmp_path: Path) -> None:
    """They are two of eight devices that were fitted. All but those of experts, where sums over drawn loads take half
    a minute."""
    for table in MEASURED.glob("*/*.csv.gz"):
        if not table.name.startswith("moe"):
            (tmp_path / table.parent.name).mkdir(exist_ok=True)
            (tmp_path / table.parent.name / table.name).symlink_to(table)
    found, committed = fit_kernel_errors(tmp_path).common, load_kernel_errors()
    assert {"attention_decode", "attention_prefill", "gemm", "latent_decode", "latent_prefill"} == set(found)
    assert found == pytest.approx({name: committed.common[name] for name in found}, abs=0.15)
    assert committed.command.endswith("--kernel-errors")


def test_a_family_without_tables_takes_the_mean_of_its_kind() -> None:
    errors = KernelErrors(common={"attention_decode": 0.2, "attention_prefill": 0.4, "gemm": 0.9})
    assert errors.of("attention_mixed") == pytest.approx(0.3)
    assert errors.of("collective") == pytest.approx(0.5)
    assert errors.of("gemm") == 0.9


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no table of kernels with a fit"):
        fit_kernel_errors(tmp_path)
