"""`AutoscalingSpec`: replicas that follow the load, by a plain rule or as Kubernetes, KEDA or Dynamo's planner scale.

Fields of `hpa`, `keda` and `dynamo` have the meaning and defaults of these projects' YAML, and may be written as there
(scaleDown or scale_down). Sources: kubernetes.io, "Horizontal Pod Autoscaling" and API reference autoscaling/v2;
keda.sh/docs/2.22, "ScaledObject specification"; docs.nvidia.com/dynamo v1.2, "Planner Guide"."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from perfmodel.files import units
from perfmodel.files.base import CheckedSpec
from perfmodel.files.units import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Seconds = Annotated[units.Seconds, Field(ge=0)]
Interval = Annotated[units.Seconds, Field(gt=0)]
Bandwidth = Annotated[units.BytesPerSecond, Field(gt=0)]
_UPPER = re.compile(r"(?<=[a-z0-9])([A-Z])")


class ForeignSpec(CheckedSpec):
    """A block of another project's YAML, whose keys may be written as there."""

    @model_validator(mode="before")
    @classmethod
    def _as_written_there(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = {key: _UPPER.sub(r"_\1", str(key)).lower() for key in data}
        twice = next((key for key, name in names.items() if key != name and name in data), None)
        if twice is not None:
            raise ValueError(f"got {twice} beside {names[twice]}, which is the same; expected one of them")
        for key, name in names.items():
            data[name] = data.pop(key)  # in place: sentences about what is wrong find the fields
        return data


def as_written(spec: ForeignSpec) -> dict[str, Any]:
    """What was given of `spec`, with the keys of its YAML."""

    def keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {re.sub(r"_(\w)", lambda match: match[1].upper(), key): keys(item) for key, item in value.items()}
        return [keys(item) for item in value] if isinstance(value, list) else value

    written: dict[str, Any] = keys(spec.model_dump(mode="json", exclude_unset=True))
    return written


class ScalingPolicy(ForeignSpec):
    """At most `value` pods, or per cent of the pods, within `period_seconds`."""

    type: Literal["Pods", "Percent"]
    value: PositiveInt
    period_seconds: Annotated[int, Field(ge=1, le=1800)]


class ScalingRules(ForeignSpec):
    """How fast one direction goes. What is left out is Kubernetes' default of the direction: at once up, by 4 pods or
    to twice as many within 15 s; down after 300 s, by any number.

    stabilization_window_seconds: the most cautious recommendation of so long counts
    select_policy: which of several policies counts: that of the largest change, of the smallest; Disabled: no change
    tolerance:     of the metric, as a fraction of its target; the controller's unless given"""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    select_policy: Literal["Max", "Min", "Disabled"] = "Max"
    policies: tuple[ScalingPolicy, ...] = ()
    tolerance: NonNegativeFloat | None = None


class ScalingBehavior(ForeignSpec):
    """Rules of both directions."""

    scale_up: ScalingRules = ScalingRules()
    scale_down: ScalingRules = ScalingRules()


class HpaSpec(ForeignSpec):
    """Kubernetes' horizontal pod autoscaler on a metric of pods, `target` being its averageValue.

    tolerance: --horizontal-pod-autoscaler-tolerance, where a direction has none of its own"""

    behavior: ScalingBehavior = ScalingBehavior()
    tolerance: NonNegativeFloat = 0.1


class KedaSpec(ForeignSpec):
    """KEDA, which scales from 0 to 1 and back by itself and between through a horizontal pod autoscaler (`hpa`) on the
    sum of the metric, `target` being the trigger's threshold (AverageValue).

    polling_interval: seconds between looks at whether the trigger is active
    cooldown_period:  seconds after it was active last until, with `min_replicas: 0`, no replica is left
    activation_threshold: above it the trigger is active. Requests that no replica has taken count, as a gateway's
                      metric has them: vLLM without replicas has none"""

    polling_interval: Interval = 30.0
    cooldown_period: Seconds = 300.0
    activation_threshold: NonNegativeFloat = 0.0


class DynamoSpec(ForeignSpec):
    """Dynamo's planner with static thresholds: a replica more where one is above the upper, one fewer where all are
    below the lower, nothing while one starts. Of prefill replicas queued tokens count, in lengths of the longest
    context; of others KV in use and queued, in sizes of their cache.

    optimization_target: which thresholds: throughput 1 and 0.1 (prefill), 1 and 0.6; latency 0.1 and 0, 0.4 and 0.1"""

    optimization_target: Literal["throughput", "latency"] = "throughput"
    load_adjustment_interval_seconds: Interval = 5.0


class StartupSpec(CheckedSpec):
    """What a new replica does beside reading its weights, one after the other, instead of `engine_start_s`.

    schedule_s:    until a node has it (0: a free device waits), `image_bytes`: pulled there, 0 where the node has them
    processes_s:   from the container's start to the first weight: Python, CUDA, ranks
    compile_s:     torch.compile, profiling; some 20 to 50 s for an 8B model, 8 to 10 s where its cache is found
    graph_s:       to capture one CUDA graph of those that the engine captures, none with enforce_eager; 0.29 s are 10 s
                   for 35 graphs of Llama-3-8B (vLLM's pull request 11005)"""

    schedule_s: Seconds = 0.0
    image_bytes: Annotated[units.Bytes, Field(ge=0)] = 0.0
    image_bandwidth_bytes_per_s: Bandwidth = 0.5e9
    processes_s: Seconds = 15.0
    compile_s: Seconds = 20.0
    graph_s: Seconds = 0.29

    def start_s(self, num_graphs: int) -> float:
        """Seconds of a start without its weights."""
        pull_s = self.image_bytes / self.image_bandwidth_bytes_per_s
        return self.schedule_s + pull_s + self.processes_s + self.compile_s + self.graph_s * num_graphs


class AutoscalingSpec(CheckedSpec):
    """As many replicas as the load asks for: ceil(load / target), the load being counted each `interval_s`.

    metric:             concurrency: requests that wait or run; queue: requests that wait, and then replicas go one at a
                        time, when no request waits; running: requests that run; kv_cache_usage: KV blocks in use,
                        `target` being a share of a replica's. Requests whose KV is on its way wait, where it goes to
    scale_down_delay_s: fewer replicas only when fewer would have done for so long; those that go finish what they have
    cold_start_s:       until a new replica serves; by default the time for its weights at `load_bandwidth_bytes_per_s`
                        (of one NVMe drive, or a 25 Gb/s network, per replica) and `engine_start_s` (processes,
                        compilation, CUDA graphs) or the parts of `startup`
    hpa, keda, dynamo:  whose rule it is instead; `interval_s` is the sync period of the first two
    scrape_interval_s:  how often Prometheus reads a replica's metrics, which `hpa` and `keda` see

    Interval and delay are those of Kubernetes' horizontal pod autoscaler by default."""

    metric: Literal["concurrency", "queue", "kv_cache_usage", "running"] = "concurrency"
    target: PositiveFloat | None = None
    min_replicas: NonNegativeInt = 1  # 0: the first request that comes starts one
    max_replicas: PositiveInt
    interval_s: Interval = 15.0
    scale_down_delay_s: Seconds = 300.0
    cold_start_s: Seconds | None = None
    load_bandwidth_bytes_per_s: Bandwidth = 3e9
    engine_start_s: Seconds = 30.0
    startup: StartupSpec | None = None
    hpa: HpaSpec | None = None
    keda: KedaSpec | None = None
    dynamo: DynamoSpec | None = None
    scrape_interval_s: Interval = 15.0

    @property
    def is_kubernetes(self) -> bool:
        """Whether Kubernetes' rule scales it, through KEDA or not."""
        return self.hpa is not None or self.keda is not None

    def _conflicts(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield f"got min_replicas {self.min_replicas}; expected at most max_replicas"
        if self.target is None and self.dynamo is None:
            yield "needs `target`, the load of one replica, or dynamo, which has thresholds of its own"
        if self.metric == "kv_cache_usage" and self.target is not None and self.target > 1:
            yield f"got target {self.target:g} of kv_cache_usage, a share of a replica's blocks; at most 1"
        if self.dynamo is not None and self.is_kubernetes:
            yield "got dynamo beside hpa or keda; expected one that scales these replicas"
        if self.min_replicas == 0 and self.keda is None and (self.is_kubernetes or self.dynamo is not None):
            yield "got min_replicas 0; hpa and dynamo keep at least 1, use keda to scale to none"
        if self.min_replicas == 0 and self.keda is not None and self.metric in ("running", "kv_cache_usage"):
            yield f"got min_replicas 0 with metric {self.metric}, which nobody has then; use concurrency or queue"
        rule = "dynamo" if self.dynamo is not None else "hpa" if self.is_kubernetes else "neither hpa nor keda"
        unused = {
            "dynamo": ("metric", "target", "interval_s", "scale_down_delay_s", "scrape_interval_s"),
            "hpa": ("scale_down_delay_s",),
        }.get(rule, ("scrape_interval_s",))
        for name in unused:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"got {name} with {rule}, which does not use it; leave it out"
        if self.startup is not None and (self.cold_start_s is not None or self.engine_start_s != 30.0):
            yield "got startup beside cold_start_s or engine_start_s; expected the parts of a start, or their sum"

    def start_s(self, weight_bytes: float, num_graphs: int = 0) -> float:
        """Cold-start seconds of a replica with `weight_bytes` that captures `num_graphs`."""
        if self.cold_start_s is not None:
            return self.cold_start_s
        rest_s = self.engine_start_s if self.startup is None else self.startup.start_s(num_graphs)
        return weight_bytes / self.load_bandwidth_bytes_per_s + rest_s
