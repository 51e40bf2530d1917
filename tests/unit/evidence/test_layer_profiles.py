"""Small kernels of two cards, from the layer profiles that are committed, and the generic ones between them."""

from pathlib import Path

import pytest

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.calibration import FamilyFit
from perfmodel.evidence.fit.layer_profile import fit_small_kernels, read_layer_profile
from perfmodel.evidence.fit.systems import GENERIC_SMALL
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
