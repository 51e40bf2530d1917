"""`PlanSpec`: the `plan` block of a scenario, and its search space."""

import re
from math import prod
from typing import Any, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from perfmodel.files.base import Spec
from perfmodel.files.units import PerSecond, PositiveFloat, PositiveInt, Seconds
from perfmodel.specs.slo import DEFAULT_ATTAINMENT

_OfRates = Literal["cheapest", "goodput_per_gpu", "fewest_gpus", "lowest_latency", "joules", "carbon"]
Objective = Literal[_OfRates, "cheapest_job", "shortest_job"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
_MAX_GPUS = 10_000  # as many engines as are simulated
_JOB_OBJECTIVES = ("cheapest_job", "shortest_job")
MAX_CANDIDATES = 100_000  # at 1,600 a second
_MAX_RUNS = 1000  # of a second or so, at each rate that the search tries
_RATIO = re.compile(r"([1-9]\d*):([1-9]\d*)")
UNIFIED = "none"


def _once(values: Any) -> Any:
    for index, value in enumerate(values if isinstance(values, tuple) else ()):
        if value in values[:index]:
            raise ValueError(f"got {value!r} twice; each value is tried once, leave one out")
    return values


class PoolSpace(Spec):
    """What the prefill or the decode engines of disaggregated candidates may have of their own. An empty list: what the
    plan's space says of all; for prefill engines, what the candidate's decode engines have.

    afd_config: of decode engines, as under `engine`: feed-forward devices of their own; null for none"""

    hardware: tuple[str, ...] = ()
    tensor_parallel_size: tuple[PositiveInt, ...] = ()
    pipeline_parallel_size: tuple[PositiveInt, ...] = ()
    data_parallel_size: tuple[PositiveInt, ...] = ()
    enable_expert_parallel: tuple[bool, ...] = ()
    max_num_seqs: tuple[PositiveInt, ...] = ()
    max_num_batched_tokens: tuple[PositiveInt, ...] = ()
    afd_config: tuple[dict[str, Any] | None, ...] = ()

    _each_value_once = field_validator("*")(_once)


class PlanSpace(Spec):
    """The values that each choice may take; every combination is a candidate. An empty list: the scenario's own value.

    What changes answers (quantization, kv_cache_dtype) or pays only for some traffic (disaggregation, speculation) is
    tried only where it is listed. For a mixture of experts the default also has expert parallelism, data-parallel
    attention, prefill and decode apart, and speculation: by the scenario's drafter, else the model's prediction head
    (MTP), else n-grams.

    disaggregation: prefill to decode replicas, as in 2:1; `none` for replicas that do both
    encoders:       encode replicas to others, or to groups of prefill and decode ones, as in 1:3; `none` for images
                    encoded where they are read. By default several ratios where the scenario has an encode pool
    prefill, decode: what engines of disaggregated candidates may have of their own: devices, parallelism, batches
    speculation:    `speculative_config` blocks as under `engine`; null for none
    replicas:       by default as few as serve the rate (as many as are allowed for lowest_latency)"""

    hardware: tuple[str, ...] = ()
    tensor_parallel_size: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    pipeline_parallel_size: tuple[PositiveInt, ...] = (1,)
    data_parallel_size: tuple[PositiveInt, ...] = (1,)
    enable_expert_parallel: tuple[bool, ...] = ()
    quantization: tuple[str | None, ...] = ()
    kv_cache_dtype: tuple[str, ...] = ()
    max_num_seqs: tuple[PositiveInt, ...] = (16, 32, 64, 128, 256, 512)
    max_num_batched_tokens: tuple[PositiveInt, ...] = (1024, 2048, 4096, 8192, 16384)
    enable_chunked_prefill: tuple[bool, ...] = ()
    disaggregation: tuple[str, ...] = (UNIFIED,)
    encoders: tuple[str, ...] = ()
    prefill: PoolSpace | None = None
    decode: PoolSpace | None = None
    speculation: tuple[dict[str, Any] | None, ...] = ()
    replicas: tuple[PositiveInt, ...] = ()
    prefill_context_parallel_size: tuple[PositiveInt, ...] = ()
    all2all_backend: tuple[str, ...] = ()
    enable_dbo: tuple[bool, ...] = ()

    @property
    def num_candidates(self) -> int:
        """Number of combinations, without those of `prefill` and `decode`."""
        return prod(max(len(values), 1) for _, values in self if isinstance(values, tuple))

    _each_value_once = field_validator("*")(_once)

    @field_validator("hardware", mode="before")
    @classmethod
    def _are_some(cls, values: Any) -> Any:
        if isinstance(values, list) and not values:
            raise ValueError("got an empty list; expected names of devices; leave it out for the scenario's own")
        return values

    @model_validator(mode="after")
    def _pools_are_of_something(self) -> "PlanSpace":
        given = [name for name in ("prefill", "decode") if getattr(self, name) is not None]
        if given and all(value == UNIFIED for value in self.disaggregation):
            raise ValueError(f"got {given[0]} without a ratio in disaggregation; give one, as in disaggregation: [1:1]")
        return self

    @field_validator("disaggregation", "encoders")
    @classmethod
    def _ratios_can_be_read(cls, values: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        kinds = "encode:other" if info.field_name == "encoders" else "prefill:decode"
        for value in values:
            if value != UNIFIED and _RATIO.fullmatch(value) is None:
                raise ValueError(f"got {value!r}; expected {kinds} replicas as in 2:1, or none")
        return values


class PlanSpec(Spec):
    """What is wanted, and what may be spent.

    objective:  cheapest: fewest USD per hour; goodput_per_gpu: highest rate under the SLO for each device;
                fewest_gpus; lowest_latency: furthest below the limits of the SLO;
                joules: least energy of the devices at the rate; carbon: least CO2 at the rate, by the scenario's `site`
                of offline jobs (arrivals of process burst), without an SLO: cheapest_job: fewest USD for all of it,
                which are most tokens per USD; shortest_job: done first
    deadline_s: within which an offline job is to be done
    attainment: the share of requests that must meet every limit of the scenario's `slo`
    confidence: the share of draws of what the calibrations leave unexplained in which the choice has to suffice; 0
                takes predictions to be exact
    rate:       requests per second to be served; by default the traffic's own
    max_gpus:   devices of all replicas together
    link_domain: the most devices that tensor parallelism may take; those of a node unless given
    finalists:  candidates that are simulated, the best that the screen has found
    seeds:      simulations of each at each rate, with equal seeds for all (common random numbers)
    num_requests: of each of them; no queue is seen to grow in fewer than 40; by default enough for its largest batch
                to come and go a few times, and for 20 times the longest wait of the SLO, at most 8,000"""

    objective: Objective = "cheapest"
    attainment: float = Field(default=DEFAULT_ATTAINMENT, gt=0, lt=1)
    confidence: float = Field(default=0.8, ge=0, lt=1)
    rate: PerSecond | None = None
    max_gpus: int = Field(default=16, ge=1, le=_MAX_GPUS)
    budget_usd_per_hour: PositiveFloat | None = None
    deadline_s: Seconds | None = Field(default=None, gt=0)
    link_domain: PositiveInt | None = None
    finalists: PositiveInt = 6
    seeds: PositiveInt = 3
    num_requests: PositiveInt | None = None
    space: PlanSpace = PlanSpace()

    @property
    def is_offline(self) -> bool:
        """Whether it plans an offline job, not a rate."""
        return self.objective in _JOB_OBJECTIVES

    @model_validator(mode="after")
    def _can_be_searched(self) -> "PlanSpec":
        num_candidates, runs = self.space.num_candidates, self.finalists * self.seeds
        if num_candidates > MAX_CANDIDATES:
            raise ValueError(
                f"got a space of {num_candidates:,} candidates; expected at most {MAX_CANDIDATES:,}, which take a "
                f"minute to screen; leave values out, coarse steps first"
            )
        if runs > _MAX_RUNS:
            raise ValueError(
                f"got {self.finalists:,} finalists with {self.seeds:,} seeds; expected at most {_MAX_RUNS:,} in all; "
                f"each is simulated at several rates, the best is nearly always among the first 6, and 3 seeds "
                f"tell candidates apart"
            )
        if self.deadline_s is not None and not self.is_offline:
            raise ValueError(
                f"got deadline_s={self.deadline_s:g} with objective {self.objective}; jobs have deadlines, set "
                f"objective to {' or '.join(_JOB_OBJECTIVES)}"
            )
        least = min(self.space.replicas, default=1)
        if least > self.max_gpus:
            raise ValueError(
                f"got space.replicas of at least {least} with max_gpus={self.max_gpus}; each replica takes a device, "
                f"raise max_gpus or lower replicas"
            )
        return self


def ratio_of(text: str) -> tuple[int, int] | None:
    """Replicas of both kinds of `2:1`; None for unified ones."""
    match = _RATIO.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))
