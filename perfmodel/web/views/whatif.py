"""What counts: a tornado of what could be bought, where bounds change, from where on an alternative pays."""

__all__ = ["ALONG", "ALTERNATIVES", "WHATIF", "WHATIF_METRICS"]

from perfmodel.errors import SpecError
from perfmodel.web.questions import Question
from perfmodel.web.state import PageState
from perfmodel.web.views.bounded import fewer_requests, whole_run
from perfmodel.web.views.view import View, ViewPart

_REQUESTS = 100  # eighteen runs of these take some seconds

WHATIF_METRICS = (
    *("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "output_throughput"),
    *("joules_per_output_token", "usd_per_million_output_tokens"),
)
ALONG = (
    ("traffic.arrivals.rate=0.25x..4x:5", "arrival rate, a quarter to four times"),
    ("hardware.hbm.bandwidth=0.5x..2x:5", "HBM bandwidth, half to twice"),
    ("hardware.peak_flops=0.5x..2x:5", "peak FLOPs, half to twice"),
    ("hardware.hbm.capacity=0.75x..2x:5", "HBM capacity, three quarters to twice"),
    ("traffic.arrivals.concurrency=0.25x..4x:5", "concurrency, a quarter to four times"),
)
ALTERNATIVES = (
    ("hardware=h200-sxm", "H200"),
    ("hardware=b200-sxm", "B200"),
    ("hardware=mi300x", "MI300X"),
    ("engine.quantization=fp8", "FP8 weights"),
    ("engine.kv_cache_dtype=fp8", "FP8 KV cache"),
    ("engine.tensor_parallel_size=2", "two devices each"),
    ("engine.max_num_batched_tokens=2048", "2,048 tokens a step"),
)


def _tornado(state: PageState) -> tuple[Question, ...]:
    """What it is, as every view has it; and what moves it, of short runs."""
    _check_metric(state)
    moved = Question.of("whatif", state, *fewer_requests(state, _REQUESTS), metric=WHATIF_METRICS)
    return (whole_run(state), moved)


def _against(state: PageState) -> tuple[Question, ...]:
    against = state.get("against")
    if not against:
        return ()
    _check_metric(state)
    along = state.get("vary", ALONG[0][0])
    fewer = fewer_requests(state, _REQUESTS)
    return (Question.of("whatif", state, *fewer, vary=along, metric=WHATIF_METRICS, against=against),)


def _check_metric(state: PageState) -> None:
    """Raises SpecError for one that the pictures are not of."""
    metric = state.get("metric")
    if metric and metric not in WHATIF_METRICS:
        raise SpecError(f"metric: found {metric[:60]!r}, allowed {', '.join(WHATIF_METRICS)}.")


WHATIF = View(
    "whatif",
    "What if",
    "Which resource counts, and from where on does an alternative pay?",
    (
        ViewPart("tornado", _tornado, "quick", help="varying what could be bought, and the load"),
        ViewPart("against", _against, "quick", help="looking for where the alternative begins to pay"),
    ),
    has_controls=True,
)
