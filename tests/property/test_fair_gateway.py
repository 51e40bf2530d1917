"""Fairness among tenants in the gateway: the bound of virtual token counters on two that always wait (Sheng et al.
2024), and what one that asks for little is spared.

A tenant's service is w_p times the prompt tokens admitted and w_q times the output tokens answered. Between two moments
at which both wait, the services of two tenants of equal weights differ by at most 2 U with U = w_p L + w_q M: L is the
longest prompt, and M the output tokens of all requests that may be under way. (Whoever is admitted has the least
counter then, and gains at most its prompt and the answers under way until another is admitted.)"""

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.engine.admission import VirtualTokenCounters
from perfmodel.sim.clock import ARRIVAL_PRIORITY, Alarm, TickEnvironment
from perfmodel.sim.driver import simulate
from perfmodel.sim.fleet.gateway import Gateway
from perfmodel.specs import load_scenario
from perfmodel.specs.cluster import GatewaySpec

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
LONGEST_PROMPT, LONGEST_ANSWER = 50, 40
lengths = st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, LONGEST_ANSWER))


class Backlog:
    """A gateway before a server that answers each request after as many ticks as it has tokens."""

    def __init__(self, rows, num_outstanding, weights, is_fair=True):
        self.env, self.tenants, self.served = TickEnvironment(), {}, [[0.0, 0.0]]
        self.counters = VirtualTokenCounters(weights, INPUT_WEIGHT, OUTPUT_WEIGHT)
        spec = GatewaySpec(max_outstanding=num_outstanding, max_queue=10_000)
        own = (self.tenants.get, self.counters) if is_fair else ()
        self.gateway = Gateway(self.env, spec, 7, lambda _: self, lambda _: None, *own)
        for number, (tenant, (prompt, outputs)) in zip(count(), rows, strict=False):
            self.tenants[number] = tenant
            request = Request(number, 0, prompt, outputs)
            Alarm(self.env, 0, lambda _, request=request: self.gateway.add(request), ARRIVAL_PRIORITY)
        self.waiting = [sum(tenant == one for tenant, _ in rows) for one in (0, 1)]
        self.env.run()

    def add(self, request):
        self.waiting[self.tenants[request.request_id]] -= 1
        self._count(request, INPUT_WEIGHT * request.num_prompt_tokens)
        Alarm(self.env, request.num_prompt_tokens + request.max_output_tokens, lambda _: self._answer(request))

    def _answer(self, request):
        request.finished_at = self.env.ticks
        self._count(request, OUTPUT_WEIGHT * request.max_output_tokens)
        self.gateway.answer(request)
        self.gateway.reschedule()

    def _count(self, request, service):
        """Services so far, as long as both tenants wait."""
        now = list(self.served[-1])
        now[self.tenants[request.request_id]] += service
        if min(self.waiting) > 0:
            self.served.append(now)

    def largest_difference(self, weights=(1.0, 1.0)):
        gaps = [one / weights[0] - other / weights[1] for one, other in self.served]
        return max(gaps) - min(gaps)


@given(
    first=st.lists(lengths, min_size=20, max_size=60),
    second=st.lists(lengths, min_size=20, max_size=60),
    order=st.randoms(use_true_random=False),
    num_outstanding=st.integers(1, 6),
    weight=st.sampled_from([1.0, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_tenants_that_always_wait_get_service_within_the_bound(first, second, order, num_outstanding, weight):
    rows = [(0, row) for row in first] + [(1, row) for row in second]
    order.shuffle(rows)
    weights = (1.0, weight)
    bound = 2 * (INPUT_WEIGHT * LONGEST_PROMPT + OUTPUT_WEIGHT * num_outstanding * LONGEST_ANSWER)
    assert Backlog(rows, num_outstanding, weights).largest_difference(weights) <= bound


def test_in_order_of_arrival_the_bound_does_not_hold():
    """Long requests before short ones, one of each in turn: their services part by 150 with every pair."""
    rows = [row for _ in range(100) for row in ((0, (50, 40)), (1, (1, 1)))]
    assert Backlog(rows, 1, (1.0, 1.0), is_fair=False).largest_difference() > 100 * 120
    assert Backlog(rows, 1, (1.0, 1.0)).largest_difference() <= 2 * (50 + 2 * 40)


def test_a_tenant_that_comes_back_has_no_credit():
    """Tenant 1 was away while 0 had a service of 300: it is lifted to the least counter of those that wait. From then
    on both are served in turn, not tenant 1 alone until it has caught up."""
    counters = VirtualTokenCounters((1.0, 1.0), 1.0, 2.0)
    for _ in range(3):
        counters.enter(0)
        counters.leave(0, 100)
    counters.enter(0)
    counters.enter(1)
    assert counters.counters == [300, 300]
    turns = []
    for _ in range(4):
        turns.append(counters.next_tenant())
        counters.enter(turns[-1])
        counters.leave(turns[-1], 100)
    assert turns == [0, 1, 0, 1]


def test_among_none_that_wait_the_last_one_sets_the_floor():
    counters = VirtualTokenCounters((1.0, 1.0), 1.0, 2.0)
    counters.enter(0)
    counters.leave(0, 100)
    counters.enter(1)
    assert counters.counters == [100, 100]


def times_to_first_token(policy):
    """Mean TTFT in s of a tenant with a tenth of the requests, where the others' come four times as fast for 20 s."""
    stages = "[{rate: 4, duration_s: 30}, {rate: 30, duration_s: 20}, {rate: 4, duration_s: 100}]"
    classes = "[{name: crowd, share: 0.9}, {name: guest, share: 0.1}]"
    gateway = f"{{max_outstanding: 24, max_queue: 5000, scheduling_policy: {policy}}}"
    traffic = (f"traffic.arrivals={{process: poisson, stages: {stages}}}", f"traffic.classes={classes}")
    length = ("traffic.input_tokens.value=500", "traffic.num_requests=1000")
    scenario = load_scenario("llama-3.1-8b-h100-2048-256", (*traffic, *length, f"cluster.gateway={gateway}"))
    crowd, guest = simulate(scenario).summary["classes"]
    return crowd["mean_ttft_ms"] / 1e3, guest["mean_ttft_ms"] / 1e3


def test_a_tenant_below_its_share_is_not_slowed_by_anothers_burst():
    """In order of arrival both wait alike; by counters the guest waits for the next free place, a fraction of it."""
    crowd_s, guest_s = times_to_first_token("priority")
    assert 0.5 < guest_s / crowd_s < 2
    fair_crowd_s, fair_guest_s = times_to_first_token("vtc")
    assert fair_guest_s < 0.1 * guest_s
    assert fair_crowd_s < 1.2 * crowd_s
