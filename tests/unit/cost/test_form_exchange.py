"""The exchange of expert parallelism: as published, never faster than its bytes, and only where a switch is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.calibrations.for_all import load_exchange_fits
from perfmodel.cost.kernel_models import DeviceFacts
from perfmodel.cost.kernel_models.messages.collective import ExchangeFit, exchange_time
from perfmodel.ops.collectives import all_to_all
from perfmodel.specs.scenario_file import load_hardware

FITS = load_exchange_fits()
DISPATCH, COMBINE = FITS.dispatch, FITS.combine
RACK = DeviceFacts.of(load_hardware("gb200"))
TOKEN = 7168 * 2.0 * 8  # bytes of a DeepSeek-V3 token in bf16, to each of eight ranks

# (ranks, tokens per rank, dispatch us, combine us) on GB200 NVL72. Source: TensorRT-LLM technical blog 18.
PUBLISHED = [
    (8, 8, 17.6, 31.4),
    (8, 2048, 311.8, 322.6),
    (16, 128, 34.6, 39.9),
    (32, 1, 19.8, 31.4),
    (32, 256, 61.5, 59.7),
    (64, 512, 115.7, 106.7),
]


def seconds(fit: ExchangeFit, tokens: float, ranks: int, device: DeviceFacts = RACK) -> float:
    return exchange_time(all_to_all(tokens * TOKEN, ranks), fit, device).duration_s


@pytest.mark.parametrize(("ranks", "tokens", "dispatch_us", "combine_us"), PUBLISHED)
def test_the_fits_are_those_of_their_figures(ranks: int, tokens: int, dispatch_us: float, combine_us: float) -> None:
    """Some of those that they were fitted to: that the file has them right, not how right they are elsewhere."""
    assert seconds(DISPATCH, tokens, ranks) == pytest.approx(dispatch_us * 1e-6, rel=0.15)
    assert seconds(COMBINE, tokens, ranks) == pytest.approx(combine_us * 1e-6, rel=0.15)


@given(st.sampled_from([DISPATCH, COMBINE]), st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(2, 72))
def test_more_tokens_never_take_less_and_none_beat_the_link(
    fit: ExchangeFit, tokens: float, more: float, ranks: int
) -> None:
    assert seconds(fit, tokens, ranks) <= seconds(fit, tokens + more, ranks)
    assert seconds(fit, tokens, ranks) > tokens * TOKEN * (ranks - 1) / ranks / RACK.link_bandwidth


def test_without_a_switch_it_is_an_all_to_all() -> None:
    device = DeviceFacts.of(load_hardware("l40s"))
    assert (
        seconds(DISPATCH, 64, 4, device)
        == seconds(COMBINE, 64, 4, device)
        == pytest.approx(
            OperatorTimer(
                device.hardware,
                load_calibration(device.hardware).model_copy(
                    update={"families": {"collective/all_to_all": DISPATCH.beyond}}
                ),
            )
            .time(all_to_all(64 * TOKEN, 4))
            .duration_s
        )
    )


@pytest.mark.parametrize("engine", ["vllm", "trtllm", "sglang"])
def test_every_calibrated_engine_has_it(engine: str) -> None:
    timer = OperatorTimer(RACK.hardware, load_calibration(RACK.hardware, engine))
    work = all_to_all(TOKEN, 32, kernel="dispatch")
    assert timer.time(work).duration_s == seconds(DISPATCH, 1, 32)
