"""Slots of LoRA adapters: which are loaded from where, as vLLM's two LRU caches have it."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import AdapterLimits, KVBlockManager, Request, Scheduler, SchedulerConfig, StepPlan
from perfmodel.engine.adapters import AdapterSlots


def request(number: int, adapter: int | None, prompt: int = 8, output: int = 3) -> Request:
    own = Request(number, number, prompt, output)
    own.adapter = adapter
    return own


def plan_of(*adapters: int | None) -> StepPlan:
    plan = StepPlan(0)
    plan.decodes = [request(number, adapter) for number, adapter in enumerate(adapters)]
    return plan


def loads(slots: AdapterSlots, *adapters: int | None) -> tuple[int, ...]:
    plan = plan_of(*adapters)
    slots.load(plan)
    assert plan.num_adapters == len({*adapters} - {None})
    assert plan.num_adapter_tokens == sum(adapter is not None for adapter in adapters)
    return tuple(plan.adapter_loads)


def test_the_least_recently_used_makes_room() -> None:
    """Two slots, three in the host: what leaves its slot is copied back, what leaves the host is read again."""
    slots = AdapterSlots(AdapterLimits(2, 3))
    assert loads(slots, 1, 2, None) == (0, 2)
    assert loads(slots, 1) == ()
    assert loads(slots, 3) == (0, 1)  # to the slot of 2, which was used before 1
    assert loads(slots, 2) == (1, 0)  # 1 leaves its slot
    assert loads(slots, 4) == (0, 1)  # 1 leaves the host, 3 its slot
    assert loads(slots, 3) == (1, 0)
    assert loads(slots, 1) == (0, 1)
    assert (slots.num_loads, slots.num_from_disk) == (7, 5)


def test_what_leaves_the_host_leaves_its_slot() -> None:
    slots = AdapterSlots(AdapterLimits(2, 2))
    assert loads(slots, 1, 2) == (0, 2)
    assert loads(slots, 3) == (0, 1)
    assert loads(slots, 1) == (0, 1)


def test_the_last_adapters_that_the_server_was_started_with_are_there() -> None:
    slots = AdapterSlots(AdapterLimits(1, 2, 4))
    assert loads(slots, 3) == ()
    assert loads(slots, 2) == (1, 0)
    assert loads(slots, 0) == (0, 1)


def test_a_server_that_starts_anew_has_its_first_adapters_again() -> None:
    slots = AdapterSlots(AdapterLimits(1, 2, 4))
    assert [loads(slots, 0), loads(slots, 1)] == [(0, 1)] * 2
    slots.start()
    assert loads(slots, 3) == ()
    assert (slots.num_loads, slots.num_from_disk) == (2, 2)


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=40),
)
def test_loads_are_those_of_two_lists(num_slots: int, more: int, steps: list[list[int]]) -> None:
    """An independent count: recency in two lists, last used last."""
    slots = AdapterSlots(AdapterLimits(num_slots, num_slots + more))
    on_device: list[int] = []
    on_host: list[int] = []
    for drawn in steps:
        step = list(dict.fromkeys(drawn))[:num_slots]
        counts = [0, 0]
        for adapter in step:
            if adapter not in on_host:
                counts[1] += 1
                if len(on_host) == num_slots + more:
                    gone = on_host.pop(0)
                    on_device = [other for other in on_device if other != gone]
            elif adapter not in on_device:
                counts[0] += 1
            if adapter not in on_device and len(on_device) == num_slots:
                on_device.pop(0)
            on_device = [other for other in on_device if other != adapter] + [adapter]
            on_host = [other for other in on_host if other != adapter] + [adapter]
        assert loads(slots, *step) == (tuple(counts) if any(counts) else ())


def test_a_request_without_a_slot_lets_others_pass_and_goes_first_in_its_turn() -> None:
    """Slots for one adapter: of requests with 0, 1, 0 the third runs beside the first, and the second after both."""
    config = SchedulerConfig(max_num_seqs=4, max_model_len=64, adapters=AdapterLimits(1, 3))
    scheduler = Scheduler(config, KVBlockManager(64, 16, False))
    requests = [request(0, 0), request(1, 1), request(2, 0), request(3, None), request(4, 1)]
    for own in requests:
        scheduler.add(own)
    begun: list[set[int]] = []
    for step in range(20):
        plan = scheduler.plan(step)
        if not plan:
            break
        begun.append({grant.request.request_id for grant in plan.chunks})
        scheduler.apply(plan, step + 1)
    assert begun[0] == {0, 2, 3}
    assert [own for own in begun if own] == [{0, 2, 3}, {1, 4}]
