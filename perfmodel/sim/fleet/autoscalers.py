"""`Autoscaler`: resizes a fleet by the rule of its spec: the plain one, Kubernetes' (with KEDA) or Dynamo's.

Kubernetes: pkg/controller/podautoscaler (replica_calculator.go, horizontal.go), whose metrics are whole
thousandths, cut off by prometheus-adapter and by KEDA.
Replicas that start, are dead or restart are pods without metrics; those that drain are no pods. Dynamo:
dynamo/planner/core/load_scaling.py of v1.2, the decisions without latency targets."""

from collections import deque
from collections.abc import Callable
from math import ceil, floor

from simpy.events import Event

from perfmodel.errors import WorkloadError
from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment, to_ticks
from perfmodel.sim.fleet.fleet import Fleet, State
from perfmodel.specs.autoscaling import AutoscalingSpec, ScalingBehavior, ScalingPolicy, ScalingRules

MAX_EVENTS = 1_000_000  # looks or failures of one run: seven seconds. A week of looks every second has 600,000
_PODS: tuple[State, ...] = ("up", "starting", "dead", "failed")
_DOUBLE = ScalingPolicy(type="Percent", value=100, period_seconds=15)
_UP = 0, (_DOUBLE, ScalingPolicy(type="Pods", value=4, period_seconds=15))  # default window in s, and policies
_DOWN = 300, (_DOUBLE,)
_DYNAMO = {  # target, whether of prefill replicas -> upper and lower threshold
    ("throughput", True): (1.0, 0.1),
    ("throughput", False): (1.0, 0.6),
    ("latency", True): (0.1, 0.0),
    ("latency", False): (0.4, 0.1),
}


class Autoscaler:
    """Resizes `fleet` by the rule of `spec`, until `is_over`."""

    def __init__(self, env: TickEnvironment, spec: AutoscalingSpec, fleet: Fleet, is_over: Callable[[], bool]) -> None:
        self._env, self._fleet, self._is_over, self._num_looks = env, fleet, is_over, 0
        rule: PlainRule | KubernetesRule | DynamoRule
        if spec.dynamo is not None:
            rule = DynamoRule(spec, fleet)
        elif spec.is_kubernetes:
            rule = pods = KubernetesRule(spec, fleet)
            # Targets are scraped at even offsets: what Prometheus knows is half an interval old on average.
            self._repeat(spec.scrape_interval_s, pods.scrape, spec.scrape_interval_s / 2)
            if spec.keda is not None:
                self._repeat(spec.keda.polling_interval, pods.poll)
        else:
            rule = PlainRule(spec, fleet)
            fleet.entrance.on_waiting.append(self._wake)
        interval_s = spec.interval_s if spec.dynamo is None else spec.dynamo.load_adjustment_interval_seconds
        self._repeat(interval_s, rule.look)

    def _wake(self) -> None:
        """Scale up now: a request waits and no replica can take it."""
        if not self._fleet.num("starting", "failed"):
            self._fleet.start()

    def _repeat(self, interval_s: float, call: Callable[[int], None], first_s: float | None = None) -> None:
        """Call `call` with the tick each `interval_s`, first after `first_s`."""
        env, interval = self._env, to_ticks(interval_s)

        def look(_: Event) -> None:
            if self._is_over():
                return
            self._num_looks += 1
            if self._num_looks > MAX_EVENTS and not env.is_paced:
                raise WorkloadError(
                    f"autoscaling has looked at the load {MAX_EVENTS:,} times in {env.ticks / TICKS_PER_S:.4g} "
                    f"simulated seconds; raise its interval_s ({interval_s:g}), or give traffic that ends sooner"
                )
            call(env.ticks)
            Alarm(env, interval, look, ARRIVAL_PRIORITY)

        Alarm(env, interval if first_s is None else to_ticks(first_s), look, ARRIVAL_PRIORITY)


class PlainRule:
    """ceil(load / target) replicas, fewer only after a delay."""

    def __init__(self, spec: AutoscalingSpec, fleet: Fleet) -> None:
        self._spec, self._fleet, self._delay = spec, fleet, to_ticks(spec.scale_down_delay_s)
        self._wanted: deque[tuple[int, int]] = deque()  # (tick, replicas) of late, each less than those before it

    def look(self, now: int) -> None:
        """Start or drain replicas."""
        fleet = self._fleet
        size, wanted = fleet.num("up", "starting", "dead"), self._desired()
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._delay:
            self._wanted.popleft()
        for _ in range(wanted - size):
            fleet.start()
        for _ in range(min(size - self._wanted[0][1], fleet.num("up"))):
            fleet.drain()

    def _desired(self) -> int:
        spec, fleet = self._spec, self._fleet
        assert spec.target is not None
        held = fleet.entrance.num_waiting
        if spec.metric == "kv_cache_usage":
            wanted = max(ceil(fleet.kv_load / spec.target), 1 if held or fleet.num_outstanding else 0)
        elif spec.metric == "queue":
            waiting, size = fleet.num_waiting + held, fleet.num("up", "starting", "dead")
            is_idle = not (waiting or fleet.num_outstanding)
            wanted = max(ceil(waiting / spec.target), 0 if is_idle else 1, size - 1 if not waiting else size)
        else:
            load = fleet.num_outstanding + held - (fleet.num_waiting if spec.metric == "running" else 0)
            wanted = ceil(load / spec.target)
        return min(max(wanted, spec.min_replicas), spec.max_replicas)


class KubernetesRule:
    """The horizontal pod autoscaler. With KEDA its metric is a sum, and the first replica comes and the last ones go by
    polling."""

    def __init__(self, spec: AutoscalingSpec, fleet: Fleet) -> None:
        assert spec.target is not None
        self._spec, self._fleet, self._target = spec, fleet, round(1000 * spec.target)
        behavior = ScalingBehavior() if spec.hpa is None else spec.hpa.behavior
        tolerance = 0.1 if spec.hpa is None else spec.hpa.tolerance
        self._up = _completed(behavior.scale_up, *_UP, tolerance)
        self._down = _completed(behavior.scale_down, *_DOWN, tolerance)
        self._metrics: dict[int, int] = {}  # thousandths, by replica, as scraped last
        self._recommended = deque([(0, fleet.num(*_PODS))])  # (tick, replicas) of the last hour
        self._changes: deque[tuple[int, int]] = deque()  # (tick, replicas started or, negative, stopped) likewise
        self._active_at = 0

    def scrape(self, _: int) -> None:
        """Prometheus reads the metrics."""
        self._metrics = {n: int(1000 * value) for n, value in self._fleet.readings(self._spec.metric).items()}

    def poll(self, now: int) -> None:
        """KEDA looks whether its trigger is active."""
        keda, size = self._spec.keda, self._fleet.num(*_PODS)
        assert keda is not None
        if self._total() > 1000 * keda.activation_threshold:
            self._active_at = now
            self._resize(0 if size else 1)
        elif self._spec.min_replicas == 0 and now - self._active_at >= to_ticks(keda.cooldown_period):
            self._resize(-size)

    def look(self, now: int) -> None:
        """The metric gives a number, the numbers of a window a cautious one, the policies the next size."""
        spec, size = self._spec, self._fleet.num(*_PODS)
        if not size and spec.keda is not None:
            return  # paused until KEDA is active
        fewest = max(spec.min_replicas, 1)
        if fewest <= size <= spec.max_replicas:
            for entries in (self._recommended, self._changes):
                while entries and now - entries[0][0] >= to_ticks(3600):
                    entries.popleft()
            self._recommended.append((now, self._total_size(size) if spec.keda is not None else self._mean_size(size)))
            wanted = max(size, min(self._within(now, self._up)))
            wanted = min(wanted, max(self._within(now, self._down)))
            if wanted > size:
                wanted = min(wanted, max(self._limit(now, size, self._up, 1), size))
            elif wanted < size:
                wanted = max(wanted, min(self._limit(now, size, self._down, -1), size))
        else:
            wanted = size
        change = min(max(wanted, fewest), spec.max_replicas) - size
        if change:
            self._changes.append((now, change))
        self._resize(change)

    def _resize(self, change: int) -> None:
        for _ in range(change):
            self._fleet.start(is_new=True)
        for _ in range(-change):
            self._fleet.stop()

    def _total(self) -> int:
        held = self._fleet.entrance.num_waiting if self._spec.metric in ("concurrency", "queue") else 0
        return sum(self._metrics.values()) + 1000 * held

    def _is_near(self, ratio: float) -> bool:
        assert self._up.tolerance is not None
        assert self._down.tolerance is not None
        return 1 - self._down.tolerance <= ratio <= 1 + self._up.tolerance

    def _total_size(self, size: int) -> int:
        """By the sum of an external metric with an AverageValue."""
        total = self._total()
        return size if self._is_near(total / (self._target * size)) else ceil(total / self._target)

    def _mean_size(self, size: int) -> int:
        """By the mean over pods. Pods without metrics are taken to have none of the load where there is too much, and
        their target's where there is too little."""
        num, total = len(self._metrics), sum(self._metrics.values())
        if not num:
            return size
        ratio, missing = total // num / self._target, max(size - num, 0)
        if missing:
            num, total = size, total + (missing * self._target if ratio < 1 else 0)
            before, ratio = ratio, total // num / self._target
            if (before < 1 < ratio) or (ratio < 1 < before):
                return size
        wanted = ceil(ratio * num)
        is_backwards = bool(missing) and ((ratio < 1 and wanted > size) or (ratio > 1 and wanted < size))
        return size if self._is_near(ratio) or is_backwards else wanted

    def _within(self, now: int, rules: ScalingRules) -> list[int]:
        """Recommendations of the window, the present one included."""
        window = to_ticks(rules.stabilization_window_seconds or 0)
        return [n for at, n in self._recommended if now - at < window] or [self._recommended[-1][1]]

    def _limit(self, now: int, size: int, rules: ScalingRules, sign: int) -> int:
        """The furthest size that the policies allow. sign: 1 up, -1 down"""
        if rules.select_policy == "Disabled":
            return size
        sizes = []
        for policy in rules.policies:
            begin = size - sum(n for at, n in self._changes if now - at < to_ticks(policy.period_seconds))
            if policy.type == "Pods":
                sizes.append(begin + sign * policy.value)
            else:
                sizes.append((floor, ceil)[sign > 0](begin * (1 + sign * policy.value / 100)))
        return max(sizes) if (rules.select_policy == "Max") == (sign > 0) else min(sizes)


def _completed(rules: ScalingRules, window: int, policies: tuple[ScalingPolicy, ...], tolerance: float) -> ScalingRules:
    given = rules.model_dump(include={"stabilization_window_seconds", "tolerance"}, exclude_none=True)
    update = {"stabilization_window_seconds": window, "policies": policies, "tolerance": tolerance, **given}
    return rules.model_copy(update=update | ({"policies": rules.policies} if rules.policies else {}))


class DynamoRule:
    """Dynamo's planner with static thresholds: one replica at a time."""

    def __init__(self, spec: AutoscalingSpec, fleet: Fleet) -> None:
        assert spec.dynamo is not None
        self._spec, self._fleet = spec, fleet
        self._is_prefill = fleet.pool.spec.role == "prefill"
        self._upper, self._lower = _DYNAMO[spec.dynamo.optimization_target, self._is_prefill]

    def look(self, _: int) -> None:
        """Start or drain one, unless one starts."""
        fleet, spec = self._fleet, self._spec
        size = fleet.num("up", "dead", "failed")
        if fleet.num("starting"):
            return
        loads = fleet.readings("queued_tokens" if self._is_prefill else "kv_demand").values()
        most = max(loads, default=self._lower)
        if most > self._upper or (self._is_prefill and most == self._upper) or size < spec.min_replicas:
            if size < spec.max_replicas:
                fleet.start()
        elif loads and size > spec.min_replicas and (most < self._lower or most == self._lower == 0):
            fleet.drain()
