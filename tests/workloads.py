"""Random workloads for engines, and a driver of the plainest kind to serve them: what laws are checked on."""

__all__ = [
    "Case",
    "Served",
    "cached_in",
    "cases",
    "estimated_cases",
    "grouped_cases",
    "judged",
    "pipelined_cases",
    "serve_in_stages",
    "serve_stepwise",
    "slotted_cases",
    "speculating_cases",
    "stages_of",
]

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st

from perfmodel.engine import (
    DISCIPLINES,
    POLICIES,
    Estimates,
    GroupedKVBlocks,
    KVBlockManager,
    RadixKVBlocks,
    Request,
    SchedulerConfig,
    ServeLoop,
    Slots,
    Speculation,
    StepPlan,
    StepRecord,
    scheduler_for,
)
from perfmodel.engine.token_watch import TokenWatch
from perfmodel.kv_groups import KVGroup

BLOCK_SIZE = 4
MAX_MODEL_LEN = 160


def cached_in(blocks: KVBlockManager) -> set[Hashable]:
    """Contents that the prefix cache holds, with the number of their group where there are several."""
    blocks.catch_up()
    return set(blocks._block_of)


@dataclass(frozen=True)
class Case:
    """An engine and the requests it is to serve: (arrival, prompt, output, hashes, priority) each, by arrival."""

    config: SchedulerConfig
    num_blocks: int
    has_prefix_cache: bool
    is_async: bool
    rows: tuple[tuple[int, int, int, tuple[tuple[int, int], ...], int], ...]
    rolling_span: int | None = None
    groups: tuple[KVGroup, ...] = ()
    paces: tuple[int | None, ...] = ()  # of the readers, in turn; tokens are watched where there are any
    has_turns: bool = False  # answers may begin the next prompt, and their blocks have contents, too

    def requests(self) -> list[Request]:
        requests = [Request(i, *row) for i, row in enumerate(self.rows)]
        for request in requests if self.has_turns else ():
            num_full = (request.num_prompt_tokens + request.max_output_tokens) // BLOCK_SIZE
            own = ((100 + request.request_id, k) for k in range(len(request.block_hashes), num_full))
            request.block_hashes = request.contents = (*request.block_hashes, *own)
            request.turn = 0
        return requests

    @property
    def max_in_flight_tokens(self) -> int:
        """That plans under way may compute of one request."""
        return (1 + self.is_async) * self.config.max_num_batched_tokens * self.config.pipeline_parallel_size

    def loop(self) -> ServeLoop:
        blocks = KVBlockManager(self.num_blocks, BLOCK_SIZE, self.has_prefix_cache, self.rolling_span)
        if self.groups:
            blocks = GroupedKVBlocks(
                self.num_blocks, BLOCK_SIZE, self.groups, self.has_prefix_cache, self.max_in_flight_tokens
            )
        if self.config.estimates is not None:
            blocks = RadixKVBlocks(self.num_blocks, BLOCK_SIZE, self.has_prefix_cache)
        watch = TokenWatch(lambda request: self.paces[request.request_id % len(self.paces)]) if self.paces else None
        return ServeLoop(scheduler_for(self.config, blocks, watch), self.is_async)


@st.composite
def cases(draw: st.DrawFn, max_requests: int = 25) -> Case:
    """Engines small enough to run out of everything: slots, budget, blocks."""
    config = SchedulerConfig(
        max_num_seqs=draw(st.sampled_from([1, 2, 4, 8])),
        max_num_batched_tokens=draw(st.sampled_from([8, 16, 64])),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 12])),
        batching=draw(st.sampled_from(sorted(DISCIPLINES))),
        scheduling_policy=draw(st.sampled_from(sorted(POLICIES))),
        batch_timeout=draw(st.sampled_from([0, 50])),
        scheduler_reserve_full_isl=draw(st.booleans()),
        prefill_exclusive=draw(st.sampled_from([False, False, True])),
        reserves_output=draw(st.sampled_from([False, False, True])),
        poll_every=draw(st.sampled_from([1, 1, 5])),
        spans=draw(st.sampled_from([(), (8,), (8, 20)])),
    )
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 10, 100, 1000]), min_size=1, max_size=max_requests))
    rows, now = [], 0
    for gap in gaps:
        now += gap
        prompt, output = draw(st.integers(1, 60)), draw(st.integers(1, 80))
        is_shared = draw(st.booleans())
        family = draw(st.integers(0, 2))
        hashes = tuple((family if k else 0, k) for k in range(prompt // BLOCK_SIZE)) if is_shared else ()
        rows.append((now, prompt, output, hashes, draw(st.integers(0, 2))))
    return Case(
        config,
        num_blocks=draw(st.sampled_from([MAX_MODEL_LEN // BLOCK_SIZE, 60, 100, 1000])),
        has_prefix_cache=draw(st.booleans()),
        is_async=draw(st.booleans()),
        rows=tuple(rows),
        rolling_span=draw(st.sampled_from([None, None, 8, 20])),
    )


@st.composite
def estimated_cases(draw: st.DrawFn) -> Case:
    """As `cases`, of engines that admit by estimates: too high, too low, with or without a radix tree."""
    case, ratio = draw(cases()), draw(st.sampled_from([0.1, 0.5, 1.0]))
    estimates = Estimates(
        most_output_tokens=draw(st.sampled_from([10, 4096])),
        first_ratio=ratio,
        least_ratio=ratio / draw(st.sampled_from([1, 10])),
        decay_steps=20,
        spared_steps=draw(st.sampled_from([0, 3])),
        ends_early=draw(st.booleans()),
        duplicate_tokens=8,
        most_sorted=draw(st.sampled_from([2, 128])),
        refresh_every=3,
    )
    config = replace(
        case.config,
        batching="continuous",
        reserves_output=False,
        estimates=estimates,
        max_num_batched_tokens=max(16, case.config.max_num_batched_tokens),
        scheduling_policy=draw(st.sampled_from(["fcfs", "lpm", "dfs-weight", "lof", "priority"])),
    )
    return replace(case, config=config, num_blocks=case.num_blocks + 2, rolling_span=None)


@st.composite
def grouped_cases(draw: st.DrawFn) -> Case:
    """As `cases`, of models whose layers keep all tokens, windows or chunks of them, in all mixtures."""
    case = draw(cases())
    full = st.just(KVGroup(1))
    windows = st.sampled_from([1, 4, 6, 8, 20, 33, 500]).map(lambda span: KVGroup(1, span))
    chunks = st.sampled_from([4, 16, 40]).map(lambda span: KVGroup(1, span, is_chunk=True))
    groups = draw(st.lists(st.one_of(full, windows, chunks), min_size=1, max_size=4).map(tuple))
    return replace(
        case,
        config=replace(case.config, batching="continuous", reserves_output=False),
        groups=groups,
        num_blocks=(case.num_blocks + 2) * len(groups),
        rolling_span=None,
    )


@st.composite
def speculating_cases(draw: st.DrawFn) -> Case:
    """As `cases`, with drafts of every shape: chains, trees, more slots than depth, chosen by the batch."""
    case, nodes = draw(cases()), draw(st.sampled_from([(0, 1), (0, 1, 2, 3, 4), (0, 3, 5), (0, 9, 9, 9)]))
    depth = st.integers(0, len(nodes) - 1)
    rows = st.lists(st.lists(depth, min_size=1, max_size=5).map(tuple), max_size=3).map(tuple)
    speculation = Speculation(
        nodes, draw(rows), draw(st.sampled_from([None, None, 1, 3])), draw(st.sampled_from([False, False, True]))
    )
    slots = -(-speculation.spare_slots // BLOCK_SIZE)
    return replace(
        case,
        config=replace(case.config, speculation=speculation),
        num_blocks=case.num_blocks + slots,
        rolling_span=None if case.rolling_span is None else case.rolling_span + nodes[-1],
    )


@st.composite
def slotted_cases(draw: st.DrawFn) -> Case:
    """As `cases`, with slots that keep their KV."""
    case = draw(cases())
    slots = Slots(draw(st.sampled_from([0.1, 0.5])), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    config = replace(case.config, batching="continuous", reserves_output=True, prefill_exclusive=False, slots=slots)
    return replace(case, config=config, has_prefix_cache=False, rolling_span=None, has_turns=draw(st.booleans()))


@st.composite
def pipelined_cases(draw: st.DrawFn) -> Case:
    """As `cases`, with one to four pipeline stages, and limits on the sequences of a plan or none."""
    case, num_stages, most = draw(cases()), draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 1, 3]))
    return replace(case, config=replace(case.config, pipeline_parallel_size=num_stages, max_plan_seqs=most))


def judged(case: Case, plan: StepPlan, seed: int = 0) -> list[int] | None:
    """How many of the drafted tokens of each decode are right: anything, but the same whoever asks."""
    if not plan.draft_depths:
        return None
    speculation = case.config.speculation
    assert speculation is not None
    return [
        Random(f"{seed} {request.request_id} {request.num_output_tokens}").randint(0, depth + speculation.pipelined)
        for request, depth in zip(plan.decodes, plan.draft_depths, strict=True)
    ]


@dataclass
class Served:
    """What a run did: plan fingerprints, the requests as they ended, the tick of the end."""

    requests: list[Request]
    fingerprints: list[str] = field(default_factory=list)
    end: int = 0
    busy: int = 0
    records: list[StepRecord] = field(default_factory=list)


def duration_of(plan: StepPlan) -> int:
    """A made-up cost: integer, growing with tokens and context."""
    return 3 + plan.num_tokens + plan.group_tokens // 2 + plan.decode_context // 7 + sum(plan.decode_windowed)


def serve_stepwise(
    case: Case,
    after_step: Callable[[ServeLoop, StepPlan], None] = lambda loop, plan: None,
    duration: Callable[[StepPlan], int] = duration_of,
) -> Served:
    """Serve `case` one step at a time; `after_step` is called after each."""
    loop, served, now, coming = case.loop(), Served([]), 0, case.requests()
    while coming or loop.has_requests:
        while coming and coming[0].arrival <= now:
            loop.add(coming.pop(0))
        plan = loop.start_step(now)
        if plan is None:
            wakeup = loop.next_wakeup(now)
            ticks = [t for t in (wakeup, coming[0].arrival if coming else None) if t is not None]
            assert ticks, "requests wait, nothing runs and nothing will happen"
            assert min(ticks) > now, "nothing runs although it could"
            now = min(ticks)
            continue
        served.fingerprints.append(plan.fingerprint())
        step = duration(plan)
        now, served.busy = now + step, served.busy + step
        while coming and coming[0].arrival <= now:
            loop.add(coming.pop(0))
        finished, record = loop.finish_step(plan, now - step, now, judged(case, plan))
        served.requests += finished
        served.records.append(record)
        after_step(loop, plan)
    served.end = now
    assert loop.scheduler.blocks.num_free == case.num_blocks
    return served


def stages_of(plan: StepPlan, num_stages: int) -> list[int]:
    """A made-up cost of a plan in each stage, uneven and different from plan to plan."""
    return [1 + (duration_of(plan) + 5 * (stage % 3) * (plan.index % 2)) // num_stages for stage in range(num_stages)]


def serve_in_stages(case: Case, after_step: Callable[[ServeLoop, StepPlan], None] = lambda loop, plan: None) -> Served:
    """Serve `case` on a flow line of stages: as long as there is room, plan; then wait for the oldest plan's end."""
    loop, served, now, coming = case.loop(), Served([]), 0, case.requests()
    under_way: deque[tuple[StepPlan, int, int]] = deque()
    ends = [0] * case.config.pipeline_parallel_size
    while coming or loop.has_requests or under_way:
        while coming and coming[0].arrival <= now:
            loop.add(coming.pop(0))
        while (plan := loop.start_step(now)) is not None:
            served.fingerprints.append(plan.fingerprint())
            end = now
            for stage, duration in enumerate(stages_of(plan, len(ends))):
                end = ends[stage] = max(end, ends[stage]) + duration
            under_way.append((plan, now, end))
            assert len(under_way) <= len(ends)
        if not under_way:
            wakeup = loop.next_wakeup(now)
            ticks = [t for t in (wakeup, coming[0].arrival if coming else None) if t is not None]
            assert ticks, "requests wait, nothing runs and nothing will happen"
            assert min(ticks) > now, "nothing runs although it could"
            now = min(ticks)
            continue
        plan, started, now = under_way.popleft()
        while coming and coming[0].arrival <= now:
            loop.add(coming.pop(0))
        finished, record = loop.finish_step(plan, started, now)
        served.requests += finished
        served.records.append(record)
        after_step(loop, plan)
    served.end = now
    assert loop.scheduler.blocks.num_free == case.num_blocks
    return served
