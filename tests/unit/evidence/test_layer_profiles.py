"""Small kernels of two cards, from the layer profiles that are committed, and the generic ones between them; and what a
layer profile adds to the fits of kernel tables."""

from pathlib import Path

import pytest

from perfmodel.cost import load_calibration, save_calibration
from perfmodel.cost.calibrations.calibration import Calibration, FamilyFit
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.evidence.fit.layer_profile import fit_small_kernels, read_layer_profile
from perfmodel.evidence.fit.recorded import _beside_others
from perfmodel.evidence.fit.systems import GENERIC_SMALL
from perfmodel.evidence.observation import KERNEL_TABLES, LAYER_PROFILE
from perfmodel.specs import load_hardware

MEASURED = Path(__file__).resolve().parents[3] / "measurements" / "per-request"
CARDS = ("rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b")
NAMES = ("overhead_s", "memory_fraction", "cached_speedup")


@pytest.fixture(scope="module")
def refitted() -> list[FamilyFit]:
    profiles = [read_layer_profile(MEASURED / card) for card in CARDS]
    return [fit_small_kernels(profile.hardware, profile.small) for profile in profiles]


@pytest.mark.parametrize(("number", "device"), [(0, "rtx-4090"), (1, "rtx-pro-6000")])
@pytest.mark.parametrize("name", NAMES)
def test_a_profile_gives_the_small_kernels_of_its_card_again(
    refitted: list[FamilyFit], number: int, device: str, name: str
) -> None:
    kept = load_calibration(load_hardware(device), "vllm").default
    assert getattr(refitted[number], name) == pytest.approx(getattr(kept, name), rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_devices_without_a_profile_have_small_kernels_between_those_of_both(
    refitted: list[FamilyFit], name: str
) -> None:
    low, high = sorted(getattr(fit, name) for fit in refitted)
    assert low <= getattr(GENERIC_SMALL, name) <= high


SMALL = FamilyFit(overhead_s=3e-6)
OF_TABLES = Calibration(
    device="rtx-4090",
    engine="vllm",
    source=KERNEL_TABLES.source("200 kernel times"),
    families={"gemm/bf16": TiledGemmFit(launch_s=1e-6), "gemm/fp8": TiledGemmFit(launch_s=2e-6)},
    default=GENERIC_SMALL,
)
OF_PROFILE = Calibration(
    device="rtx-4090",
    engine="vllm",
    source=LAYER_PROFILE.source("50 kernel times"),
    families={"gemm/bf16": TiledGemmFit(launch_s=9e-6), "attention_mixed/bf16": SMALL, "elementwise": SMALL},
    default=SMALL,
)


@pytest.mark.parametrize(("first", "second"), [(OF_TABLES, OF_PROFILE), (OF_PROFILE, OF_TABLES)])
def test_a_profile_adds_what_tables_lack_and_replaces_nothing_whichever_comes_first(
    tmp_path: Path, first: Calibration, second: Calibration
) -> None:
    file = save_calibration(first, tmp_path / "rtx-4090@vllm.yaml")
    both = _beside_others(second, file)
    added = {key: fit for key, fit in OF_PROFILE.families.items() if key != "gemm/bf16"}
    assert both.families == OF_TABLES.families | added
    assert both.default == SMALL
    assert both.source == f"{OF_TABLES.source}; {OF_PROFILE.source}"
    save_calibration(both, file)
    faster = OF_PROFILE.model_copy(update={"families": OF_PROFILE.families | {"elementwise": GENERIC_SMALL}})
    assert _beside_others(faster, file).families == both.families | {"elementwise": GENERIC_SMALL}
    again = OF_TABLES.model_copy(update={"families": {"gemm/bf16": TiledGemmFit(launch_s=5e-6)}})
    assert _beside_others(again, file).families == again.families | added


def test_tables_replace_tables_and_a_profile_a_profile(tmp_path: Path) -> None:
    for fitted in (OF_TABLES, OF_PROFILE):
        file = save_calibration(fitted, tmp_path / "rtx-4090@vllm.yaml")
        newer = fitted.model_copy(update={"families": {"elementwise": SMALL}})
        assert _beside_others(newer, file) == newer
    assert _beside_others(OF_TABLES, tmp_path / "nowhere.yaml") == OF_TABLES
