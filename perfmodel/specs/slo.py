"""`SLO`: limits on requests and on whole runs."""

from collections.abc import Iterator
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from pydantic import Field

from perfmodel.files.base import CheckedSpec
from perfmodel.files.units import Milliseconds, PositiveFloat

DEFAULT_ATTAINMENT = 0.9  # share of requests that must meet the limits, unless a plan says otherwise
Amounts = Any  # a number, or an array of them
_WORDS_PER_TOKEN = 0.75  # of English text (OpenAI, "What are tokens and how to count them?": 100 tokens, 75 words)


_SHARES = {"mean": None, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_LATENCIES = {"ttft": ("ttft", "TTFT"), "tpot": ("tpot", "TPOT"), "itl": ("itl", "ITL"), "e2e": ("e2el", "E2E latency")}


class StatisticLimit(NamedTuple):
    """Limit on the mean or a percentile of a run: `ttft_p99_ms: 1000`."""

    field: str
    latency: str  # ttft, tpot, itl or e2el
    statistic: str  # mean, p50, p90, p95 or p99
    limit_ms: float

    @property
    def share(self) -> float | None:
        """Share of requests that the percentile covers; None for a mean."""
        return _SHARES[self.statistic]

    @property
    def metric(self) -> str:
        """Limited summary metric: p99_ttft_ms."""
        return f"{'median' if self.statistic == 'p50' else self.statistic}_{self.latency}_ms"

    @property
    def in_words(self) -> str:
        """`p99 TTFT`"""
        return f"{self.statistic} {next(words for name, words in _LATENCIES.values() if name == self.latency)}"

    def is_met(self, value_ms: float | None, lost_share: float = 0.0) -> bool:
        """Whether the statistic of completed requests is within the limit and few enough were lost: at most the share
        above the percentile; none for a mean, since lost requests have no latency."""
        allowed = 0.0 if self.share is None else 1 - self.share
        return value_ms is not None and value_ms <= self.limit_ms and lost_share <= allowed + 1e-9


class SLO(CheckedSpec):
    """A request is good when it meets every limit that is given for single requests; a run, when enough of them are
    good (`plan.attainment`, by default 0.9) and its mean and percentiles are within theirs.

    ttft_ms_per_input_token: as much more for each token of its prompt: long ones may take longer
    reading_tokens_per_s: a reader who starts at the first token and reads so fast never waits for a token (the deadline
                      of token k is k / speed after the first: Andes, Liu et al. 2024; Etalon, Agrawal et al. 2024)
    reading_words_per_minute: the same in words, of which 100 tokens are 75. Adults read 238 of English non-fiction
                      silently (Brysbaert 2019, a meta-analysis)
    ttft_p99_ms ...:  the percentile or mean of all requests' TTFT, TPOT or end-to-end latency, or of all gaps between
                      tokens (itl): mean, p50, p90, p95, p99, each by itself"""

    ttft_ms: Milliseconds | None = Field(default=None, gt=0)  # until its first token
    ttft_ms_per_input_token: Milliseconds | None = Field(default=None, gt=0)
    tpot_ms: Milliseconds | None = Field(default=None, gt=0)  # mean time between tokens after the first
    min_tokens_per_s: PositiveFloat | None = None  # the same, the other way round: tokens per second after the first
    max_itl_ms: Milliseconds | None = Field(default=None, gt=0)  # the longest gap between two of its tokens
    e2el_ms: Milliseconds | None = Field(default=None, gt=0)  # until its last token
    reading_tokens_per_s: float | None = Field(default=None, gt=0, le=1e6)
    reading_words_per_minute: float | None = Field(default=None, gt=0, le=1e6)
    reading_wait_ms: Milliseconds = Field(default=0.0, ge=0)  # so long may that reader wait, over the whole answer
    ttft_mean_ms: Milliseconds | None = Field(default=None, gt=0)
    ttft_p50_ms: Milliseconds | None = Field(default=None, gt=0)
    ttft_p90_ms: Milliseconds | None = Field(default=None, gt=0)
    ttft_p95_ms: Milliseconds | None = Field(default=None, gt=0)
    ttft_p99_ms: Milliseconds | None = Field(default=None, gt=0)
    tpot_mean_ms: Milliseconds | None = Field(default=None, gt=0)
    tpot_p50_ms: Milliseconds | None = Field(default=None, gt=0)
    tpot_p90_ms: Milliseconds | None = Field(default=None, gt=0)
    tpot_p95_ms: Milliseconds | None = Field(default=None, gt=0)
    tpot_p99_ms: Milliseconds | None = Field(default=None, gt=0)
    itl_mean_ms: Milliseconds | None = Field(default=None, gt=0)
    itl_p50_ms: Milliseconds | None = Field(default=None, gt=0)
    itl_p90_ms: Milliseconds | None = Field(default=None, gt=0)
    itl_p95_ms: Milliseconds | None = Field(default=None, gt=0)
    itl_p99_ms: Milliseconds | None = Field(default=None, gt=0)
    e2e_mean_ms: Milliseconds | None = Field(default=None, gt=0)
    e2e_p50_ms: Milliseconds | None = Field(default=None, gt=0)
    e2e_p90_ms: Milliseconds | None = Field(default=None, gt=0)
    e2e_p95_ms: Milliseconds | None = Field(default=None, gt=0)
    e2e_p99_ms: Milliseconds | None = Field(default=None, gt=0)

    def _conflicts(self) -> Iterator[str]:
        if self.reading_tokens_per_s is not None and self.reading_words_per_minute is not None:
            yield "got reading_tokens_per_s beside reading_words_per_minute; give one of them"
        speed = self.min_tokens_per_s
        if self.tpot_ms is not None and speed is not None and abs(self.tpot_ms * speed - 1e3) > 1:
            yield (
                f"got tpot_ms {self.tpot_ms:g}, which is {1e3 / self.tpot_ms:g} tokens/s, beside min_tokens_per_s "
                f"{self.min_tokens_per_s:g}; both limit the time between tokens, give one of them"
            )
        if self.reading_wait_ms and self.reading_speed is None:
            yield (f"got reading_wait_ms {self.reading_wait_ms:g} without a reader; give reading_tokens_per_s, too")
        percentiles = [limit for limit in self.statistics if limit.share is not None]
        for lower, higher in pairwise(percentiles):
            if lower.latency == higher.latency and higher.limit_ms < lower.limit_ms:
                yield (
                    f"got {higher.field} {higher.limit_ms:g} below {lower.field} {lower.limit_ms:g}; a higher "
                    f"percentile is never the lower latency, so the second limits nothing: leave it out or lower it"
                )

    @property
    def is_given(self) -> bool:
        return bool(self.limits_in_words)

    def in_words(self, attainment: float, whom: str = "requests") -> str:
        """`90% of requests with TTFT <= 500 ms, with p99 TPOT <= 40 ms`; `whom`: the word for requests."""
        single = self.request_limits_in_words
        whole = self.limits_in_words[len(single) :]
        parts = [f"{attainment:.0%} of {whom} with {' and '.join(single)}"] if single else []
        return ", ".join([*parts, *([f"with {' and '.join(whole)}"] if whole else [])])

    @property
    def is_of_requests(self) -> bool:
        return bool(self.request_limits_in_words)

    @property
    def statistics(self) -> tuple[StatisticLimit, ...]:
        """Limits on means and percentiles by latency, mean first, percentiles ascending."""
        return tuple(
            StatisticLimit(field, latency, statistic, limit)
            for name, (latency, _) in _LATENCIES.items()
            for statistic in _SHARES
            if (limit := getattr(self, field := f"{name}_{statistic}_ms")) is not None
        )

    @property
    def reading_speed(self) -> float | None:
        if self.reading_words_per_minute is not None:
            return self.reading_words_per_minute / 60 / _WORDS_PER_TOKEN
        return self.reading_tokens_per_s

    @property
    def tpot_limit_ms(self) -> float | None:
        """The tighter of `tpot_ms` and `min_tokens_per_s`."""
        given = [] if self.tpot_ms is None else [self.tpot_ms]
        if self.min_tokens_per_s is not None:
            given.append(1e3 / self.min_tokens_per_s)
        return min(given, default=None)

    def limit_ms(self, metric: str) -> float | None:
        """Limit on ttft, tpot, max_itl, e2el or reader_wait in ms, if one number holds for all requests; else None."""
        if metric == "ttft":
            return self.ttft_ms if self.ttft_ms_per_input_token is None else None
        if metric == "reader_wait":
            return self.reading_wait_ms if self.reading_speed is not None else None
        limit: float | None = self.tpot_limit_ms if metric == "tpot" else getattr(self, f"{metric}_ms", None)
        return limit

    def ttft_limit_ms(self, num_prompt_tokens: Amounts) -> Amounts:
        """TTFT limit in ms for prompts of `num_prompt_tokens`; requires one."""
        return (self.ttft_ms or 0.0) + (self.ttft_ms_per_input_token or 0.0) * num_prompt_tokens

    def planned_ms(self, metric: str) -> float | None:
        """As `limit_ms`; a reading speed counts as TPOT, the nearest metric without single token times."""
        limit = self.limit_ms(metric)
        if metric != "tpot" or self.reading_speed is None:
            return limit
        return min(1e3 / self.reading_speed, limit or inf)

    @property
    def has_ttft_limit(self) -> bool:
        return self.ttft_ms is not None or self.ttft_ms_per_input_token is not None

    @property
    def needs_token_times(self) -> bool:
        """Whether limits need more than first and last token times."""
        return self.max_itl_ms is not None or self.reading_speed is not None

    @property
    def limits_in_words(self) -> tuple[str, ...]:
        """`TTFT <= 500 ms`, `reading at 5 tokens/s`, `p99 TPOT <= 40 ms`: each limit."""
        of_runs = (f"{limit.in_words} <= {limit.limit_ms:g} ms" for limit in self.statistics)
        return (*self.request_limits_in_words, *of_runs)

    @property
    def request_limits_in_words(self) -> tuple[str, ...]:
        """As `limits_in_words`, per-request limits only."""
        limits = []
        if self.has_ttft_limit:
            parts = [f"{self.ttft_ms:g} ms"] if self.ttft_ms is not None else []
            if self.ttft_ms_per_input_token is not None:
                parts.append(f"{self.ttft_ms_per_input_token:g} ms per input token")
            limits.append(f"TTFT <= {' + '.join(parts)}")
        others = {
            "TPOT <= {:g} ms": self.tpot_ms,
            "at least {:g} tokens/s": self.min_tokens_per_s,
            "longest gap <= {:g} ms": self.max_itl_ms,
            "E2E latency <= {:g} ms": self.e2el_ms,
        }
        limits += [words.format(limit) for words, limit in others.items() if limit is not None]
        if self.reading_speed is not None:
            wait = f", waiting {self.reading_wait_ms:g} ms in all" if self.reading_wait_ms else ""
            limits.append(f"reading at {self.reading_speed:.3g} tokens/s{wait}")
        return tuple(limits)
