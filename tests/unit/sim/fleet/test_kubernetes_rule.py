"""Kubernetes' autoscaler, KEDA and Dynamo's planner on a stub fleet: figures of their own tests, and hand counts.

Kubernetes: pkg/controller/podautoscaler/replica_calculator_test.go (Apache-2.0), the tests named below."""

from math import ceil
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.sim.clock import ARRIVAL_PRIORITY, TICKS_PER_S, Alarm, TickEnvironment
from perfmodel.sim.fleet.autoscalers import Autoscaler
from perfmodel.specs.autoscaling import AutoscalingSpec

UP_AT_ONCE = {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}


class PodsFleet:
    """Replicas start at once or after `start_s`; `load` is what all together say, `held` what waits for a replica."""

    def __init__(self, env, size, load=0.0, start_s=0.0, role="unified"):
        self.env, self.load, self.held, self.start_s = env, load, 0, start_s
        self.up = dict.fromkeys(range(size), True)  # by number, whether it serves
        self.entrance = SimpleNamespace(num_waiting=0, on_waiting=[])
        self.pool = SimpleNamespace(spec=SimpleNamespace(role=role))
        self.sizes = [(0.0, size)]
        self.values = None

    def num(self, *states):
        ready = sum(self.up.values())
        return sum({"up": ready, "starting": len(self.up) - ready}.get(state, 0) for state in states)

    def readings(self, _):
        numbers = [number for number, is_up in self.up.items() if is_up]
        if self.values is not None:
            return dict(zip(numbers, self.values, strict=False))
        return {number: self.load / len(numbers) for number in numbers}

    def start(self, is_new=False):
        number = max(self.up, default=-1) + 1
        self.up[number] = not self.start_s
        if self.start_s:
            Alarm(self.env, round(self.start_s * TICKS_PER_S), lambda _: self._serve(number), ARRIVAL_PRIORITY)
        self._note()
        return True

    def _serve(self, number):
        if number in self.up:
            self.up[number] = True

    def stop(self):
        del self.up[next((number for number, is_up in self.up.items() if not is_up), max(self.up))]
        self._note()

    drain = stop

    def _note(self):
        self.sizes.append((self.env.ticks / TICKS_PER_S, len(self.up)))


def run(size, until_s, events=(), fleet_fields=None, **fields):
    """Sizes after value change, [(second, replicas)], until `until_s`. events: (second, function of the fleet)"""
    env = TickEnvironment()
    fleet = PodsFleet(env, size, **(fleet_fields or {}))
    end = until_s * TICKS_PER_S
    for at_s, call in events:
        Alarm(env, round(at_s * TICKS_PER_S), lambda _, call=call: call(fleet), ARRIVAL_PRIORITY)
    spec = AutoscalingSpec(**({"target": 4, "max_replicas": 100} | fields))
    Autoscaler(env, spec, fleet, lambda: env.ticks > end)
    env.run_until_idle()
    return list(dict(fleet.sizes).items())


def setter(**fields):
    def apply(fleet):
        for name, value in fields.items():
            target = fleet.entrance if name == "num_waiting" else fleet
            setattr(target, name, value)

    return apply


@pytest.mark.parametrize(
    ("size", "values", "target", "expected"),
    [
        (3, (20, 10, 30), 15, 4),  # TestReplicaCalcScaleUpCM
        (5, (12, 12, 12, 12, 12), 20, 3),  # TestReplicaCalcScaleDownCM
        (3, (50, 10, 30), 15, 6),  # TestReplicaCalcScaleUpCMUnreadyHotCpuNoLessScale
        (3, (20, 21, 21), 20, 3),  # within the tolerance of a tenth
        (10, (4.41,) * 10, 4, 12),  # just above it: 10 x 1.1025, rounded up
        (3, (2, 2, 3), 4, 2),  # the mean is cut to 2.333: 3 x 0.58325
        (1, (0,), 4, 1),  # never below the fewest
    ],
)
def test_the_size_is_that_of_kubernetes_own_tests(size, values, target, expected):
    sizes = run(size, 16, [(1, setter(values=values))], hpa=UP_AT_ONCE, target=target)
    assert sizes[-1][1] == expected


def test_keda_divides_the_sum_by_the_threshold():
    """TestReplicaCalcScaleUpPerPodCMExternal: 8.6 / 2.15 of 3 replicas are 4."""
    sizes = run(3, 16, [(1, setter(values=(3.6, 4, 1)))], keda={}, hpa=UP_AT_ONCE, target=2.15)
    assert sizes[-1][1] == 4


@pytest.mark.parametrize(("value", "expected"), [(8, 4), (13, 7), (1, 3), (3.7, 4)])
def test_pods_without_metrics_count_against_the_change(value, expected):
    """Two serve, two start, target 4. Too much load: they count as 0, so 8 value is 16 / 4 = the target, no change, and
    13 value gives ceil(26 / 4). Too little: as the target, so 1 value is (2 + 8) / 4 of 4, ceil(2.5)."""

    def two_starting(fleet):
        fleet.up = {0: True, 1: True, 2: False, 3: False}
        fleet.values = (value, value)

    assert run(4, 16, [(1, two_starting)], hpa=UP_AT_ONCE)[-1][1] == expected


def test_by_default_it_doubles_or_adds_four_every_quarter_of_a_minute():
    """From 1: 5 (1 + 4 is more than twice), 10, 20, 30."""
    assert run(1, 75, fleet_fields={"load": 120}, hpa={})[1:] == [(15, 5), (30, 10), (45, 20), (60, 30)]


def test_policies_count_what_was_added_within_their_period():
    """Two pods per 30 s, looked at every 15 s: 3 at 15 s, none at 30 s (15 s ago is within the period), 5 at 45 s."""
    policy = {"type": "Pods", "value": 2, "periodSeconds": 30}
    rules = {"behavior": {"scaleUp": {"policies": [policy]}}}
    assert run(1, 80, fleet_fields={"load": 40}, hpa=rules)[1:] == [(15, 3), (45, 5), (75, 7)]


@pytest.mark.parametrize(("select", "expected"), [("Max", 20), ("Min", 11), ("Disabled", 10)])
def test_of_several_policies_the_selected_one_counts(select, expected):
    policies = [
        {"type": "Pods", "value": 1, "periodSeconds": 60},
        {"type": "Percent", "value": 100, "periodSeconds": 60},
    ]
    rules = {"behavior": {"scaleUp": {"policies": policies, "selectPolicy": select}}}
    assert run(10, 30, fleet_fields={"load": 400}, hpa=rules)[-1][1] == expected


@pytest.mark.parametrize(("select", "expected"), [("Max", 5), ("Min", 9), ("Disabled", 10)])
def test_downwards_the_largest_change_is_the_smallest_size(select, expected):
    policies = [
        {"type": "Pods", "value": 1, "periodSeconds": 60},
        {"type": "Percent", "value": 50, "periodSeconds": 60},
    ]
    down = {"policies": policies, "selectPolicy": select, "stabilizationWindowSeconds": 0}
    assert run(10, 30, fleet_fields={"load": 4}, hpa={"behavior": {"scaleDown": down}})[-1][1] == expected


def test_the_highest_recommendation_of_the_window_holds_back():
    """10 replicas are recommended up to 15 s, 6 to 45 s, then 1. What was recommended 300 s ago no longer counts,
    so 6 come at 315 s; the last 6 were recommended at 45 s, so that 1 is left at 345 s."""
    events = [(20, setter(load=24)), (50, setter(load=4))]
    assert run(10, 400, events, {"load": 40}, hpa={})[1:] == [(315, 6), (345, 1)]


def test_an_upward_window_waits_for_the_lowest_recommendation():
    rules = {"behavior": {"scaleUp": {"stabilizationWindowSeconds": 60}}}
    assert run(1, 100, [(20, setter(load=12))], {"load": 4}, hpa=rules)[1:] == [(75, 3)]


def test_metrics_are_as_old_as_the_last_scrape():
    """Scrapes at 10, 30, 50 ... s: a load that comes at 31 s is seen at 60 s, by a look that comes value 15 s."""
    sizes = run(1, 61, [(31, setter(load=12))], {"load": 4}, hpa={}, scrape_interval_s=20)
    assert sizes[1:] == [(60, 3)]


def test_keda_starts_the_first_replica_and_stops_the_last():
    """Polls at 30, 60 ... s: one starts at 30 s for what has come at 1 s. Active last at 90 s, as the
    load is gone from 100 s on: the last one stops at the first poll at least 120 s later."""
    events = [(1, setter(num_waiting=3)), (40, setter(num_waiting=0, load=3)), (100, setter(load=0))]
    keda = {"pollingInterval": 30, "cooldownPeriod": 120}
    assert run(0, 400, events, keda=keda, min_replicas=0)[1:] == [(30, 1), (210, 0)]


def test_keda_is_inactive_up_to_its_activation_threshold():
    events = [(1, setter(num_waiting=3))]
    assert run(0, 100, events, keda={"activationThreshold": 3}, min_replicas=0)[1:] == []
    assert run(0, 100, events, keda={"activationThreshold": 2.9}, min_replicas=0)[1:][0] == (30, 1)


@given(load=st.integers(1, 300), target=st.integers(1, 9), size=st.integers(1, 40), start_s=st.sampled_from([0, 40]))
@settings(max_examples=40, deadline=None)
def test_a_constant_load_ends_within_the_tolerance_and_stays(load, target, size, start_s):
    """Wherever it begins and however long a start takes, it stops where load / replicas is near the target, or where
    one replica fewer would be too few."""
    sizes = run(size, 3000, (), {"load": load, "start_s": start_s}, hpa={}, target=target, max_replicas=400)
    last_s, last = sizes[-1]
    assert last_s < 1500
    assert last == 1 or load / last <= 1.1 * target + 1e-3
    assert last == size or last - 1 < ceil(load / target * 1.001) or load / last >= 0.9 * target


@pytest.mark.parametrize(
    ("target", "role", "values", "expected"),
    [
        ("throughput", "unified", (1.01, 0.1), 3),  # any above
        ("throughput", "unified", (1.0, 0.1), 2),
        ("throughput", "decode", (0.59, 0.59), 1),  # all below
        ("throughput", "decode", (0.61, 0.1), 2),
        ("throughput", "prefill", (1.0, 0.0), 3),  # at least
        ("throughput", "prefill", (0.09, 0.0), 1),
        ("latency", "unified", (0.41, 0.0), 3),
        ("latency", "unified", (0.4, 0.0), 2),
        ("latency", "unified", (0.09, 0.0), 1),
        ("latency", "prefill", (0.1, 0.0), 3),
        ("latency", "prefill", (0.0, 0.0), 1),
        ("latency", "prefill", (0.01, 0.0), 2),
    ],
)
def test_dynamo_moves_by_one_at_its_thresholds(target, role, values, expected):
    fields = {"target": None, "dynamo": {"optimization_target": target}, "max_replicas": 9}
    assert run(2, 6, [(1, setter(values=values))], {"role": role}, **fields)[-1][1] == expected


def test_dynamo_waits_while_a_replica_starts():
    fields = {"target": None, "dynamo": {}, "max_replicas": 9}
    sizes = run(1, 61, [(1, setter(values=(2.0,) * 9))], {"start_s": 22}, **fields)
    assert [at for at, _ in sizes[1:]] == [5, 30, 55]
