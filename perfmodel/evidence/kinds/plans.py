"""`validate plans`: replays an engine's recorded scheduling decisions against ours, step by step.

A recording is JSON, optionally gzipped: `engine`, `version`, and `cases` of

    config    engine arguments as in `EngineSpec`, and `num_blocks` KV blocks; ignore_eos: the engine is told that
              answers have their full length (SGLang), as they do here; `num_encoded`: other engines have encoded the
              images with a content below it
    requests  arrival [step], prompt and output [tokens], priority, abort [step]; the first `shared` prompt tokens are
              common to its `group`; `accepted`: drafted tokens accepted by each verification; `load`: leading tokens in
              another engine's KV cache, which arrive within the step that needs them or, with `load_steps`, so many
              outcomes later, before its first admission; `loaded`: tokens that arrive if a load fails; `send_steps`:
              outcomes from its end until another engine has fetched its KV; `slot`: its slot, if the engine has slots;
              `adapter`: the LoRA adapter that it names; `images`: [tokens before it, tokens, content] of each;
              `drafts`: tokens that are drafted after each of its tokens, else all; `grammar_steps`: steps from its
              arrival until the grammar of its answer is compiled
              With `kv_offload` in the config, `load_steps`: outcomes that its loads from the host take
    steps     [step, [[request, tokens computed before, tokens granted] ...], [preempted request ...]] of each plan; a
              fourth number repeats the grants for so many further steps, each after the last. A grant of 0 tokens: KV
              of that many tokens starts to arrive from another engine. A negative one, with `ec_role` in the config:
              an image of that many tokens is encoded. SGLang's omit steps without decisions

Each step makes one plan, then takes the outcome of the oldest plan in flight; async scheduling plans before the
previous outcome is known, as vLLM's `step_with_batch_queue`."""

import gzip
import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray
from pydantic import Field, ValidationError, field_validator, model_validator

from perfmodel.engine import (
    EncoderInput,
    EncoderRules,
    HostBlocks,
    Request,
    RequestStatus,
    Scheduler,
    Speculation,
    StepPlan,
    scheduler_for,
)
from perfmodel.engine.tiered_blocks import TieredBlocks
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence.observation import first_problem, reported
from perfmodel.files.base import Spec
from perfmodel.kv_groups import KVGroup
from perfmodel.renderable import Renderable, columns_of
from perfmodel.sim.replica.serving import engine_scheduler_config, kv_block_manager
from perfmodel.sim.traffic.draft_lengths import with_drafter
from perfmodel.specs.engine.spec import EngineSpec

_MAX_WORST = 10
_MAX_STEPS = 100_000

Grant = tuple[int, int, int]  # request, tokens computed before, tokens granted
Step = tuple[int, Sequence[Grant], Sequence[int]]  # step, grants, preempted requests


class _RecordedRequest(Spec):
    arrival: int = Field(ge=0)
    prompt: int = Field(ge=1)
    output: int = Field(ge=1)
    shared: int = Field(default=0, ge=0)
    group: int = 0
    priority: int = 0
    abort: int | None = None
    accepted: tuple[int, ...] = ()
    slot: int | None = Field(default=None, ge=0)
    load: int = Field(default=0, ge=0)
    load_steps: int | None = Field(default=None, ge=1)
    loaded: int | None = Field(default=None, ge=0)
    send_steps: int | None = Field(default=None, ge=1)
    adapter: int | None = None
    images: tuple[tuple[int, int, int], ...] = ()
    drafts: tuple[int, ...] = ()
    grammar_steps: int | None = Field(default=None, ge=0)


class RecordedCase(Spec):
    """A workload with an engine's decisions."""

    config: dict[str, Any]
    requests: tuple[_RecordedRequest, ...]
    steps: list[Step]

    @field_validator("steps", mode="before")
    @classmethod
    def _each_by_itself(cls, steps: Any) -> Any:
        try:
            return [step for recorded in steps for step in _expanded(recorded)]
        except TypeError:
            raise ValueError("expected [step, grants, preempted requests] and perhaps how often it repeats") from None


def _expanded(recorded: Any) -> Iterator[Any]:
    if not (isinstance(recorded, list) and len(recorded) == 4):
        yield recorded
        return
    step, grants, preempted, times = recorded
    for number in range(min(int(times), _MAX_STEPS) + 1):
        yield step + number, [(i, computed + number * n, n) for i, computed, n in grants], [] if number else preempted


@dataclass(frozen=True, repr=False)
class PlansReport(Renderable):
    """The result of `perfmodel validate plans`.

    rows, covered, equal: cases recorded, replayable, and with all plans equal
    by:                   group (engine and version, then features) -> rows and equal ones
    worst:                cases that differ: case, step, features, and both plans of that step in words
    notes:                cases that could not be replayed, with the reason"""

    kind: str
    rows: int
    covered: int
    equal: int
    by: Mapping[str, Mapping[str, int]]
    worst: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    def columns(self) -> dict[str, NDArray[Any]]:
        """Columns `group`, `rows` and `equal`."""
        return columns_of([{"group": name, **group} for name, group in self.by.items()])

    def to_json(self) -> dict[str, Any]:
        """As one JSON document."""
        counts = {"rows": self.rows, "covered": self.covered, "equal": self.equal}
        by = {name: dict(group) for name, group in self.by.items()}
        worst = [dict(row) for row in self.worst]
        return {"kind": self.kind, **counts, "metrics": {}, "by": by, "worst": worst, "notes": list(self.notes)}


def validate_plans(path: str, progress: Callable[[int, int | None], None] | None = None) -> PlansReport:
    """Replay all cases of the recording at `path`. Raises SpecError for another file."""
    file = Path(path)
    try:
        data = json.loads(gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes())
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise SpecError(f"{path}: is no JSON ({error}); expected a recording of plans") from None
    if not isinstance(data, dict) or not isinstance(data.get("cases"), list):
        raise SpecError(f"{path}: has no list of cases; expected a recording with engine, version and cases")
    engine, version = str(data.get("engine", "vllm")), str(data.get("version", ""))
    by: dict[str, Counter[str]] = {}
    worst: list[dict[str, Any]] = []
    notes: list[str] = []
    equal = covered = 0
    for number, raw in enumerate(reported(data["cases"], len(data["cases"]), progress)):
        try:
            case = RecordedCase.model_validate(raw)
        except ValidationError as error:
            raise SpecError(f"{path}: case {number}: {first_problem(error)}") from None
        try:
            slots: dict[int, int] = {}
            steps = list(replay(case, engine, version, slots))
        except PerfmodelError as error:
            notes.append(f"Case {number} could not be replayed: {error}")
            continue
        difference = _difference(steps, case, slots)
        covered, equal = covered + 1, equal + (difference is None)
        features = _features_of(case)
        for group in (f"{engine} {version}", *features):
            by.setdefault(group, Counter(rows=0, equal=0)).update(rows=1, equal=int(difference is None))
        if difference is not None and len(worst) < _MAX_WORST:
            step, recorded, ours = difference
            worst.append({"case": number, "step": step, "features": features, "recorded": recorded, "ours": ours})
    return PlansReport("plans", len(data["cases"]), covered, equal, by, worst, notes)


def _features_of(case: RecordedCase) -> list[str]:
    config = case.config
    named = {
        "async scheduling": config.get("async_scheduling"),
        "prefix caching": config.get("enable_prefix_caching"),
        "whole prompts": not config.get("enable_chunked_prefill", True),
        "mixed chunks": config.get("prefill_exclusive") is False,
        **{policy: config.get("scheduling_policy") == policy for policy in ("priority", "lpm", "dfs-weight", "lof")},
        "answers that may end early": config.get("ignore_eos") is False,
        "long_prefill_token_threshold": config.get("long_prefill_token_threshold"),
        "speculation": config.get("num_speculative_tokens"),
        "pipeline stages": config.get("pipeline_parallel_size", 1) > 1,
        "KV groups": config.get("kv_groups"),
        "slots": any(request.slot is not None for request in case.requests),
        "--cache-ram": config.get("cache_ram"),
        "--kv-unified": config.get("kv_unified"),
        "aborts": any(request.abort is not None for request in case.requests),
        "KV transfer": config.get("kv_role"),
        "LoRA": config.get("enable_lora"),
        "images": any(request.images for request in case.requests),
        "encode pools": config.get("ec_role"),
        "KV offloading": config.get("kv_offload"),
        "pooling": config.get("runner") == "pooling",
        "encoder": config.get("kv_cache") == "off",
        "shapes": any(request.grammar_steps is not None for request in case.requests),
        "drafts of any length": any(request.drafts for request in case.requests),
        "preemption": any(preempted for _, _, preempted in case.steps),
    }
    return [name for name, is_there in named.items() if is_there] or ["plain"]


def replay(case: RecordedCase, engine: str, version: str, slots: dict[int, int] | None = None) -> Iterator[Step]:
    """Our scheduler's steps of `case` under the rules of `engine` and `version`. slots: filled with the slot of each
    request, if it has slots. Raises SpecError for an invalid config, WorkloadError for a request that can never run."""
    spec, extras = _engine_of(case.config, engine, version)
    config = engine_scheduler_config(spec, spec.max_model_len or 1)
    if config.slots is not None:
        own = replace(config.slots, saves_prompts=extras.cache_ram, is_unified=extras.kv_unified)
        config = replace(config, slots=own)
    if extras.num_speculative_tokens:
        nodes = tuple(range(extras.num_speculative_tokens + 1))
        past_end, is_ahead = spec.rules.drafts_past_end, spec.async_scheduling
        by_match = nodes if any(request.drafts for request in case.requests) else ()
        speculation = Speculation(nodes, past_end=past_end, is_ahead=is_ahead, depth_by_match=by_match)
        config = replace(config, speculation=with_drafter(speculation, spec.rules, extras.drafter))
    if extras.kv_role is not None or extras.kv_offload is not None:
        config = replace(config, defers_frees=spec.defers_frees)
    if extras.encoder_budget:
        sizes = extras.encoder_budget, extras.encoder_cache_size
        rules = EncoderRules(*sizes, extras.whole_images, spec.async_scheduling, spec.mm_encoder_only)
        config = replace(config, encoder=rules)
    estimates, transfers, offload = config.estimates, _Transfers(case), extras.kv_offload
    for number, recorded in enumerate(case.requests if offload is not None else ()):
        if given := {"load", "loaded", "send_steps"} & recorded.model_fields_set:
            raise SpecError(
                f"request {number}: got {min(given)} beside config.kv_offload; transfers from and to other engines are "
                f"not replayed with a tier of one's own, leave one of the two out"
            )
    blocks = kv_block_manager(
        spec,
        extras.num_blocks,
        extras.groups,
        num_buffers=sum(group.kind == "state" for group in extras.kv_groups),  # a request has a block of each
        host=transfers.immediate() if offload is None else offload.tier(spec),
        by_estimates=estimates is not None,
    )
    if estimates is not None:
        config = replace(config, estimates=replace(estimates, ends_early=not extras.ignore_eos))
    scheduler = scheduler_for(config, blocks)
    known = _requests_of(case, spec, extras)
    for request in known.values():
        if extras.kv_offload is None:
            transfers.prepare(request)
    pending = deque((case.requests[number].arrival, request) for number, request in known.items())
    aborts = sorted((request.abort, i) for i, request in enumerate(case.requests) if request.abort is not None)
    compiled = [(one.arrival + (one.grammar_steps or 0), i) for i, one in enumerate(case.requests) if one.grammar_steps]
    compiled.sort()
    num_verified: Counter[int] = Counter()
    num_sampled: Counter[int] = Counter()

    def accepted(plan: StepPlan) -> list[int] | None:
        """Accepted drafts of each decode, as scripted; None without drafts."""
        if not plan.draft_depths:
            return None
        result = []
        for request, depth in zip(plan.decodes, plan.draft_depths, strict=True):
            number = request.request_id
            script = case.requests[number].accepted or (0,)
            result.append(min(script[num_verified[number] % len(script)], depth) if depth else 0)
            num_verified[number] += bool(depth)
        return result

    under_way: deque[StepPlan] = deque()
    most_under_way = 2 if spec.async_scheduling else config.pipeline_parallel_size
    for step in range(_MAX_STEPS):
        if not (pending or under_way or scheduler.has_requests or transfers.under_way):
            return
        while pending and pending[0][0] <= step:
            scheduler.add(pending.popleft()[1])
        while aborts and aborts[0][0] <= step:
            scheduler.abort(known[aborts.pop(0)[1]])
        while compiled and compiled[0][0] <= step:
            known[compiled.pop(0)[1]].awaits_grammar = False
            scheduler.retry_waiting()
        has_work = scheduler.has_requests or bool(transfers.under_way)
        if not (under_way or has_work):
            if estimates is None:  # SGLang's recordings omit idle steps
                yield step, [], []
            continue
        is_empty = True
        if has_work:
            plan = scheduler.plan(step)
            transfers.begin(plan.loads)
            if plan or plan.preempted or estimates is None:
                yield _as_step(step, plan, scheduler, under_way, has_encoded=extras.ec_role is not None)
            under_way.append(plan)
            is_empty = not plan
        if is_empty or len(under_way) == most_under_way:
            plan = under_way.popleft()
            if config.slots is not None and slots is not None:
                begun = [*plan.singles, *(grant.request for grant in plan.chunks)]
                slots.update((request.request_id, request.admission) for request in begun)
            transfers.pass_outcome(scheduler, scheduler.apply(plan, step, accepted(plan)))
            for request in (*plan.decodes, *plan.samples):  # which have a token that drafts come after
                if drafts := case.requests[request.request_id].drafts:
                    request.num_matched = drafts[num_sampled[request.request_id] % len(drafts)]
                    num_sampled[request.request_id] += 1


class _RecordedGroup(Spec):
    """Layers that share a block table: full attention, a window or chunks of `span` tokens, or a state."""

    kind: Literal["full", "window", "chunk", "state"]
    span: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_its_span(self) -> "_RecordedGroup":
        if (self.span is None) == (self.kind in ("window", "chunk")):
            raise ValueError(f"got span={self.span} for kind={self.kind}; expected a span for window and chunk alone")
        return self


class _RecordedOffload(Spec):
    """A tier that prompts are written through to, as vLLM's OffloadingConnector has it."""

    num_blocks: int = Field(ge=1)
    store_threshold: int = Field(default=0, ge=0)

    def tier(self, spec: EngineSpec) -> TieredBlocks:
        after, shares = max(self.store_threshold, 1), spec.enable_prefix_caching
        return TieredBlocks(self.num_blocks, spec.block_size, is_async=True, store_after=after, is_shared=shares)


class _Extras(Spec):
    """Config fields beyond the engine's arguments."""

    num_blocks: int = Field(ge=1)
    num_speculative_tokens: int = Field(default=0, ge=0)
    drafter: Literal["ngram", "eagle", "draft_model"] = "ngram"
    ignore_eos: bool = True
    kv_groups: tuple[_RecordedGroup, ...] = ()
    cache_ram: bool = False  # --cache-ram with --cache-idle-slots
    kv_unified: bool = False
    kv_role: Literal["kv_consumer", "kv_both"] | None = None
    encoder_budget: int = Field(default=0, ge=0)  # tokens of images in a step, and cached at once
    encoder_cache_size: int = Field(default=0, ge=0)
    whole_images: bool = False  # --disable-chunked-mm-input
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"] | None = None
    num_encoded: int = Field(default=0, ge=0)
    kv_offload: _RecordedOffload | None = None

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """Attention layer groups, if they keep different parts of a sequence."""
        attending = [group for group in self.kv_groups if group.kind != "state"]
        if len(attending) < 2:
            return ()
        return tuple(KVGroup(1, group.span, is_chunk=group.kind == "chunk") for group in attending)


class _Transfers:
    """Scripted KV transfers in and out."""

    def __init__(self, case: RecordedCase) -> None:
        self._requests = case.requests
        self.under_way: dict[Request, int] = {}  # outcomes left

    def immediate(self) -> HostBlocks | None:
        """KV that arrives within the step; None without."""
        tokens = {i: request.load for i, request in enumerate(self._requests) if request.load_steps is None}
        return _ImmediateKV(tokens) if any(tokens.values()) else None

    def prepare(self, request: Request) -> None:
        """Register what is stored elsewhere, before the request arrives."""
        recorded = self._requests[request.request_id]
        request.num_transferred_tokens = recorded.load if recorded.load_steps is not None else 0
        request.keeps_blocks = recorded.send_steps is not None

    def begin(self, loads: Iterable[Request]) -> None:
        """Start loads for the requests that wait for them."""
        for request in loads:
            if request.status is not RequestStatus.RUNNING:
                self.under_way[request] = self._requests[request.request_id].load_steps or 1

    def pass_outcome(self, scheduler: Scheduler, finished: Iterable[Request]) -> None:
        """Advance by one outcome, with which `finished` requests ended."""
        self.under_way = {request: left - 1 for request, left in self.under_way.items()}
        over = [request for request, left in self.under_way.items() if not left]
        for request in sorted(over, key=attrgetter("request_id")):
            del self.under_way[request]
            if request.status is RequestStatus.FINISHED:
                scheduler.release(request)
            else:
                scheduler.finish_load(request, self._requests[request.request_id].loaded)
        for request in finished:
            if request.keeps_blocks:
                self.under_way[request] = self._requests[request.request_id].send_steps or 1


class _ImmediateKV(HostBlocks):
    """A second tier that holds leading tokens of requests, by number, at every admission."""

    def __init__(self, tokens: Mapping[int, int]) -> None:
        super().__init__(capacity=0)
        self._tokens = tokens

    def num_ready(self, request: Request, num_cached: int, block_size: int) -> int:
        return max(num_cached, min(self._tokens.get(request.request_id, 0), request.num_tokens - 1))

    def restore(self, request: Request, num_cached: int, num_ready: int, block_size: int) -> int:
        return 0


def _engine_of(config: Mapping[str, Any], engine: str, version: str) -> tuple[EngineSpec, _Extras]:
    """The engine, and its extras. Raises SpecError for an invalid config."""
    settings = {name: value for name, value in config.items() if name not in _Extras.model_fields}
    settings.setdefault("async_scheduling", False)
    try:
        spec = EngineSpec.model_validate({**settings, "profile": engine, "version": version or None})
        return spec, _Extras.model_validate({name: config[name] for name in config if name in _Extras.model_fields})
    except ValidationError as error:
        raise SpecError(f"config.{first_problem(error)}") from None


def _requests_of(case: RecordedCase, spec: EngineSpec, extras: _Extras) -> dict[int, Request]:
    """Requests by number, in order of arrival, then number."""
    result, has_hashes = {}, spec.enable_prefix_caching or extras.kv_offload is not None
    order = sorted(range(len(case.requests)), key=lambda i: (case.requests[i].arrival, i))
    for place, number in enumerate(order):
        recorded = case.requests[number]
        num_full = recorded.prompt // spec.block_size if has_hashes else 0
        num_shared = min(recorded.shared // spec.block_size, num_full)
        images = tuple(EncoderInput(*image, None, image[2] < extras.num_encoded) for image in recorded.images)
        hashes: tuple[Hashable, ...] = tuple(
            (
                "group",
                recorded.group,
                row,
                recorded.adapter,
                *(item for item in images if item.offset < (row + 1) * spec.block_size),
            )
            if row < num_shared
            else ("prompt", number, row)
            for row in range(num_full)
        )
        result[number] = Request(number, place, recorded.prompt, recorded.output, hashes, recorded.priority)
        result[number].encoder_inputs, result[number].adapter = images, recorded.adapter
        if recorded.grammar_steps is not None:
            result[number].grammar, result[number].awaits_grammar = 0, recorded.grammar_steps > 0
    return result


def _as_step(step: int, plan: StepPlan, scheduler: Scheduler, under_way: Iterable[StepPlan], has_encoded: bool) -> Step:
    """`plan` as recorded: drafts under verification count as computed."""
    drafting = [other for other in under_way if other.draft_depths or other.padded]
    behind = {request: drafted for other in drafting for request, drafted in _drafted(other)}
    decodes = [
        (request.request_id, scheduler.num_computed(request) - 1 + behind.get(request, 0), 1 + drafted)
        for request, drafted in _drafted(plan)
    ]
    chunks = [(grant.request.request_id, grant.num_computed_tokens, grant.num_new_tokens) for grant in plan.chunks]
    loads = [request for request in plan.loads if request.status is not RequestStatus.RUNNING]
    chunks += [(request.request_id, request.num_computed_tokens, 0) for request in loads]
    encoded = plan.encoded if has_encoded else ()
    chunks += [(request.request_id, item.offset, -item.num_tokens) for request, item in encoded]
    return step, sorted(decodes + chunks), sorted(request.request_id for request in plan.preempted)


def _drafted(plan: StepPlan) -> Iterator[tuple[Request, int]]:
    """Each decode of the plan, with its drafted or padding tokens."""
    padding = plan.num_padding_tokens // max(len(plan.padded), 1)
    for request, depth in zip(plan.decodes, plan.draft_depths or [0] * len(plan.decodes), strict=True):
        yield request, padding if request in plan.padded else depth


def _difference(ours: Sequence[Step], case: RecordedCase, slots: Mapping[int, int]) -> tuple[int, str, str] | None:
    """First differing step: (step, recorded, ours) in words; None if all are equal."""
    for our_step, recorded_step in zip_longest(ours, case.steps):
        a, b = (step and (step[0], list(step[1]), list(step[2])) for step in (our_step, recorded_step))
        if a != b:
            number = (recorded_step or our_step)[0]
            return number, _in_words(recorded_step, our_step), _in_words(our_step, recorded_step)
    for number, request in enumerate(case.requests):
        if request.slot is not None and number in slots and slots[number] != request.slot:
            text = f"request {number} in slot"
            return request.arrival, f"{text} {request.slot}", f"{text} {slots[number]}"
    return None


def _in_words(step: Step | None, other: Step | None) -> str:
    """How `step` differs from `other`."""
    if step is None:
        return "no further plan"
    known = ({tuple(grant) for grant in other[1]}, set(other[2])) if other is not None else (set(), set())
    grants = [
        f"{n} tokens of request {i} behind {computed}"
        if n > 0
        else f"{-n} tokens of request {i} behind {computed} encoded"
        if n
        else f"{computed} tokens of request {i} begin to come"
        for i, computed, n in step[1]
        if (i, computed, n) not in known[0]
    ]
    preempted = [f"request {request} preempted" for request in step[2] if request not in known[1]]
    return "; ".join([*grants, *preempted]) or "nothing else"
