"""Replicas that come and go: `AutoscalingSpec`, and `FailuresSpec`."""

__all__ = ["AutoscalingSpec", "FailureEvent", "FailuresSpec", "Slowdown"]

from typing import Annotated, Literal

from pydantic import Field, model_validator

from perfmodel.files.amounts import NonNegativeInt, PositiveFloat, PositiveInt
from perfmodel.files.base import Spec
from perfmodel.files.units import BytesPerSecond, Seconds


class AutoscalingSpec(Spec):
    """As many replicas as the load asks for: ceil(load / target), the load being counted each `interval_s`.

    metric:             concurrency: requests that wait or run; queue: requests that wait, and then replicas go one at a
                        time, when no request waits; kv_cache_usage: KV blocks in use, `target` being a share of a
                        replica's. Requests whose KV is on its way wait, where it goes to
    scale_down_delay_s: fewer replicas only when fewer would have done for so long; those that go finish what they have
    min_replicas:       0: the first request that comes starts one
    cold_start_s:       until a new replica serves; by default the time for its weights at `load_bandwidth_bytes_per_s`
                        (of one NVMe drive, or a 25 Gb/s network, per replica) and `engine_start_s` (processes,
                        compilation, CUDA graphs)

    Interval and delay are those of Kubernetes' horizontal pod autoscaler by default.
    """

    metric: Literal["concurrency", "queue", "kv_cache_usage"] = "concurrency"
    target: PositiveFloat
    min_replicas: NonNegativeInt = 1
    max_replicas: PositiveInt
    interval_s: Annotated[Seconds, Field(gt=0)] = 15.0
    scale_down_delay_s: Annotated[Seconds, Field(ge=0)] = 300.0
    cold_start_s: Annotated[Seconds, Field(ge=0)] | None = None
    load_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)] = 3e9
    engine_start_s: Annotated[Seconds, Field(ge=0)] = 30.0

    @model_validator(mode="after")
    def _is_a_range(self) -> "AutoscalingSpec":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"found min_replicas {self.min_replicas}, allowed at most max_replicas")
        if self.metric == "kv_cache_usage" and self.target > 1:
            raise ValueError(
                f"found target {self.target:g} of kv_cache_usage, a share of a replica's blocks; at most 1"
            )
        return self

    def start_s(self, weight_bytes: float) -> float:
        """Seconds until a new replica with so many bytes of weights serves."""
        if self.cold_start_s is not None:
            return self.cold_start_s
        return weight_bytes / self.load_bandwidth_bytes_per_s + self.engine_start_s


class FailureEvent(Spec):
    """The replica of this number in the pool of this number (from 0) dies at `at_s` and is away for `down_s`."""

    at_s: Annotated[Seconds, Field(ge=0)]
    pool: NonNegativeInt = 0
    replica: NonNegativeInt = 0
    down_s: Annotated[Seconds, Field(ge=0)] | None = None


class Slowdown(Spec):
    """Steps of this replica in this pool (from 0) take `factor` times as long from `at_s` on, for `for_s` or always."""

    factor: Annotated[float, Field(gt=1)]
    pool: NonNegativeInt = 0
    replica: NonNegativeInt = 0
    at_s: Annotated[Seconds, Field(ge=0)] = 0.0
    for_s: Annotated[Seconds, Field(gt=0)] | None = None


class FailuresSpec(Spec):
    """Replicas die, and what they had in hand and in their KV caches with them; `slowdowns` of some make stragglers.

    mtbf_s:      mean time between failures of one replica, exponentially distributed
    repair_s:    until it may start again
    start_s:     how long it then takes to start, where no autoscaling says so
    detection_s: until health checks notice that a replica is dead, at the latest when it may start again; requests are
                 sent to it until then, and wait with those that it had
    """

    mtbf_s: Annotated[Seconds, Field(gt=0)] | None = None
    repair_s: Annotated[Seconds, Field(ge=0)] = 60.0
    start_s: Annotated[Seconds, Field(ge=0)] = 60.0
    detection_s: Annotated[Seconds, Field(ge=0)] = 0.0
    events: tuple[FailureEvent, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    @model_validator(mode="after")
    def _says_when(self) -> "FailuresSpec":
        if self.mtbf_s is None and not (self.events or self.slowdowns):
            raise ValueError("needs `mtbf_s`, or `events` with the times, or `slowdowns`")
        return self
