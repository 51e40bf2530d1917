"""What traffic does to latencies: at the rate that is asked for; the largest rate within the SLO; against the rate,
with its knee; against the length of prompts.

Runs at many rates are short (`_QUICK` requests), so that an answer is there while one drags; the templates say so. The
rate that is asked for is no part of the curve's question: within a range of rates only its mark moves.
"""

__all__ = ["PAUSE_S", "TRAFFIC", "asked_rate", "largest_rate"]

from math import floor, log10

from perfmodel.answers.asked import LIMITS
from perfmodel.files.units import parse_quantity
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.bounded import fewer_requests, whole_run
from perfmodel.web.views.view import View, ViewPart

PAUSE_S = "30"  # of a user between an answer and the next question, unless the address says it
_RATE, _PAUSE, _COUNT = "traffic.arrivals.rate", "traffic.arrivals.think_time_s", "traffic.num_requests"
_DURATION = "traffic.duration_s"
_QUICK, _POINTS = 400, 7
_LATENCIES = tuple(f"{statistic}_{name}_ms" for name in ("ttft", "tpot", "e2el") for statistic in ("mean", "p99"))
_LOADS = ("request_throughput", "request_goodput", "slo_attainment", "output_throughput")
_BELOW, _ABOVE = 4, 4  # how far the rates reach from the one that is asked for
_FAR_BELOW, _FAR_ABOVE, _FAR_POINTS = 8, 32, 3  # of the rates among which the largest within the SLO is looked for
_IDLE_RATE, _IDLE_COUNT, _LENGTHS = "0.02", 6, "256..32768:8"


def asked_rate(state: PageState) -> float | None:
    """The rate that the address says, in requests/s; None where it says none, or no rate."""
    text = state.get("rate") or state.get(_RATE)
    try:
        rate = float(parse_quantity(text, "requests/s")) if text else 0.0
    except (TypeError, ValueError):
        return None
    return rate if 0 < rate < 1e9 else None


def largest_rate(state: PageState) -> Question:
    """The largest rate within the SLO, looked for far around; every view that shows it asks this."""
    rate = asked_rate(state)
    ends = f"{rate / _FAR_BELOW:.3g}..{rate * _FAR_ABOVE:.3g}" if rate else f"{1 / _FAR_BELOW:g}x..{_FAR_ABOVE}x"
    vary = f"{_RATE}={ends}:{_FAR_POINTS}"
    return Question.of("whatif", _unrated(state), *_short(state), *_pause(state), vary=vary, metric=_LOADS[:2])


def _curve(state: PageState) -> tuple[Question, ...]:
    vary, metrics = f"{_RATE}={_range(state)}:{_POINTS}", (*_LATENCIES, *_LOADS)
    return (Question.of("whatif", _unrated(state), *_short(state), *_pause(state), vary=vary, metric=metrics),)


def _pause(state: PageState) -> tuple[str, ...]:
    return () if state.get(_PAUSE) else (f"{_PAUSE}={PAUSE_S}",)


def _bands(state: PageState) -> tuple[Question, ...]:
    """The 80 % intervals at every second rate of the curve: each takes as long as some ten points."""
    fixed = _unrated(state).changed(dict.fromkeys((*LIMITS, _PAUSE)))
    vary, means = f"{_RATE}={_range(state)}:{_POINTS // 2 + 1}", _LATENCIES[::2]
    return (Question.of("whatif", fixed, *_short(state), vary=vary, metric=means, intervals=True),)


def _unrated(state: PageState) -> PageState:
    return state if asked_rate(state) is None else state.changed({"rate": None, _RATE: None})


def _range(state: PageState) -> str:
    """Rates from low to high: as the address says, else about the rate in steps of 1, 2, 5, so that they stay while one
    drags; else multiples of the traffic's own rate."""
    low, high, rate = state.get("low"), state.get("high"), asked_rate(state)
    if not (low or high or rate):
        return f"{1 / _BELOW:g}x..{_ABOVE}x"
    ends = [_number(low), _number(high)]
    if rate is None:
        rate = ends[0] * _BELOW if ends[0] else (ends[1] or 1.0) / _ABOVE
    return f"{low or f'{_rounded(rate / _BELOW):g}'}..{high or f'{_rounded(rate * _ABOVE):g}'}"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e9 else None


def _rounded(rate: float) -> float:
    """The largest of 1, 2, 5, 10 ... that is not above."""
    scale = 10.0 ** floor(log10(rate) + 1e-9)
    return max(step for step in (1, 2, 5) if step * scale <= rate * (1 + 1e-9)) * scale


def _short(state: PageState) -> tuple[str, ...]:
    """So few requests that the answer is there at once, unless the address says how many."""
    return fewer_requests(state, _QUICK)


def _prompts(state: PageState) -> tuple[Question, ...]:
    """Time to first token of an idle server by the length of the prompt."""
    idle = state.changed({"rate": None, _RATE: None, _COUNT: None, _DURATION: None})
    sets = (
        f"{_RATE}={_IDLE_RATE}",
        f"{_COUNT}={_IDLE_COUNT}",
        "traffic.arrivals.process=constant",
        "traffic.input_tokens.distribution=fixed",
        "traffic.input_tokens.value=1024",
        "traffic.input_tokens.max=32768",
    )
    vary = f"traffic.input_tokens.value={_LENGTHS}"
    return (Question.of("whatif", idle, *sets, vary=vary, metric="mean_ttft_ms"),)


TRAFFIC = View(
    "traffic",
    "Traffic",
    "How much traffic does it carry, and how long do people wait?",
    (
        ViewPart("now", lambda state: (whole_run(state),), "quick", help="the traffic as it is"),
        ViewPart("limit", lambda state: (largest_rate(state),), "quick", help="the largest rate within the limits"),
        ViewPart("curve", _curve, "quick", help="latencies against the rate of requests", later=_bands),
        ViewPart("prompts", _prompts, "quick", help="time to first token against the length of prompts"),
    ),
    has_controls=True,
)
