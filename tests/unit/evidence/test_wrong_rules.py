"""Each rule of an engine's scheduler that we could get wrong is noticed by the replay of its recorded plans."""

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from perfmodel.engine import GroupedKVBlocks, KVBlockManager, RadixKVBlocks, Scheduler, admission
from perfmodel.engine.adapters import AdapterSlots
from perfmodel.engine.decode_cohort import DecodeCohort
from perfmodel.engine.drafting import DraftingRequests
from perfmodel.engine.encoder_cache import EncoderCache
from perfmodel.engine.estimating import RetractingRequests
from perfmodel.engine.running import RunningRequests
from perfmodel.engine.slots import SlottedRequests
from perfmodel.engine.tiered_blocks import TieredBlocks
from perfmodel.evidence.kinds import plans
from perfmodel.evidence.kinds.plans import RecordedCase, replay

MEASURED = Path(__file__).parents[3] / "measurements" / "plans"


def finds_the_last_token(patch: pytest.MonkeyPatch) -> None:
    def cached_prefix(self, request):
        blocks = []
        self.catch_up()
        for content in request.contents[: request.num_tokens // self.block_size]:
            if content not in self._block_of:
                break
            blocks.append(self._block_of[content])
        return blocks

    patch.setattr(KVBlockManager, "cached_prefix", cached_prefix)


def forgets_copies(patch: pytest.MonkeyPatch) -> None:
    enter = KVBlockManager._enter

    def only_first(self, content, block):
        if content not in self._block_of:
            enter(self, content, block)

    patch.setattr(KVBlockManager, "_enter", only_first)


def reuses_in_order_of_freeing(patch: pytest.MonkeyPatch) -> None:
    begin = KVBlockManager.__init__

    def init(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        self._reuses_partial_first = False

    patch.setattr(KVBlockManager, "__init__", init)


def reuses_first_blocks_first(patch: pytest.MonkeyPatch) -> None:
    give_back = KVBlockManager._give_back
    patch.setattr(KVBlockManager, "_give_back", lambda self, blocks, hashed: give_back(self, blocks[::-1], hashed))


def forgets_own_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVBlockManager, "publish_own", lambda self, request, num_tokens: None)


def names_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRequests, "num_known_tokens", lambda self, request: request.num_computed_tokens)


def ignores_the_threshold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRequests, "chunk", lambda self, missing, budget: min(missing, budget))


def admits_on_the_first_chunk(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config
    lenient = lambda *given: replace(config(*given), scheduler_reserve_full_isl=False)  # noqa: E731
    patch.setattr(plans, "engine_scheduler_config", lenient)


def serves_the_longest_wait_first(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config
    patch.setattr(plans, "engine_scheduler_config", lambda *given: replace(config(*given), scheduling_policy="fcfs"))


def goes_on_after_giving_way(patch: pytest.MonkeyPatch) -> None:
    make_room = RunningRequests._make_room

    def spares_itself(self, request, num_tokens, plan):
        others = [other for other in self.requests if other is not request]
        if not others:
            return make_room(self, request, num_tokens, plan)
        key, self._key = self._key, lambda other: (-1,) if other is request else key(other)
        try:
            return make_room(self, request, num_tokens, plan)
        finally:
            self._key = key

    patch.setattr(RunningRequests, "_make_room", spares_itself)


# Of tiers of KV that prompts are written through to.
def offers_no_block_that_the_device_had(patch: pytest.MonkeyPatch) -> None:
    restore = TieredBlocks.restore

    def skips_them(self, request, num_cached, num_ready, size):
        number = restore(self, request, num_cached, num_ready, size)
        request.num_offered_blocks = max(request.num_offered_blocks, num_ready // size)
        return number

    patch.setattr(TieredBlocks, "restore", skips_them)


def loads_what_another_loads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredBlocks, "must_wait", lambda self, *given: False)


def loads_short_of_the_last_token(patch: pytest.MonkeyPatch) -> None:
    short = lambda self, request, size: min((request.num_tokens - 1) // size, len(request.contents))  # noqa: E731
    patch.setattr(TieredBlocks, "num_reusable", short)


def copies_at_the_first_offer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredBlocks, "_count", lambda self, content: 10)


def copies_only_what_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieredBlocks, "_offer", lambda self, request: None)


# Of drafts planned ahead, KV transfer and whole prompts.


def forgets_drafts_under_way(patch: pytest.MonkeyPatch) -> None:
    grant = DraftingRequests._grant_decode

    def forgetful(self, request, depth, plan):
        grant(self, request, depth, plan)
        self._unverified.pop(request, None)

    patch.setattr(DraftingRequests, "_grant_decode", forgetful)


def names_drafts_under_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftingRequests, "num_known_tokens", lambda self, request: request.num_computed_tokens)


def stops_drafting_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftingRequests, "_depth_before_end", lambda self, computed, lacking, most: min(lacking - 1, most))


def preempts_in_flight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRequests, "is_in_flight", lambda self, request, plan=None: False)


def loads_what_prompts_need(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRequests, "num_reserved_blocks", lambda self: 0)


def loads_without_a_slot(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config
    patch.setattr(plans, "engine_scheduler_config", lambda *given: replace(config(*given), loads_need_slot=False))


def hides_what_has_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_take_load", lambda self, request: bool(request.num_computed_tokens))


def takes_lost_blocks_for_loaded(patch: pytest.MonkeyPatch) -> None:
    finish = Scheduler.finish_load
    patch.setattr(Scheduler, "finish_load", lambda self, request, num_tokens=None: finish(self, request))


def frees_before_it_is_fetched(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def careless(self, request):
        request.keeps_blocks = False
        add(self, request)

    patch.setattr(Scheduler, "add", careless)


def cuts_whole_prompts(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config
    cutting = lambda *given: replace(config(*given), enable_chunked_prefill=True)  # noqa: E731
    patch.setattr(plans, "engine_scheduler_config", cutting)


def generates_after_the_prompt(patch: pytest.MonkeyPatch) -> None:
    requests = plans._requests_of

    def longer(case, spec, **has_hashes):
        result = requests(case, spec, **has_hashes)
        for request in result.values():
            request.max_output_tokens += 1
        return result

    patch.setattr(plans, "_requests_of", longer)


def starts_with_the_first_slot(patch: pytest.MonkeyPatch) -> None:
    choose = SlottedRequests._choose

    def first(self, contents, num_tokens):
        if all(at < 0 for at in self._freed_at):
            return min(self._free)
        return choose(self, contents, num_tokens)

    patch.setattr(SlottedRequests, "_choose", first)


def grants_prompts_as_they_came(patch: pytest.MonkeyPatch) -> None:
    chunks = SlottedRequests._chunks

    def in_order(self, budget, decodes):
        self._prompts.sort(key=lambda request: request.request_id)
        return chunks(self, budget, decodes)

    patch.setattr(SlottedRequests, "_chunks", in_order)


def takes_any_likeness(patch: pytest.MonkeyPatch) -> None:
    _with_slots(patch, least_similarity=0.0)


def saves_no_prompts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlottedRequests, "_save", lambda self, held: None)


def keeps_unified_slots_full(patch: pytest.MonkeyPatch) -> None:
    _with_slots(patch, is_unified=False)


def loads_the_least_wanted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("perfmodel.engine.slots._MIN_KEPT", 0.0)


def calls_in_order(patch: pytest.MonkeyPatch) -> None:
    fill = Scheduler._fill_slots

    def unreversed(self, slotted, now):
        self._num_deferred = 0
        fill(self, slotted, now)

    patch.setattr(Scheduler, "_fill_slots", unreversed)


def _with_slots(patch: pytest.MonkeyPatch, **rules: object) -> None:
    init = SlottedRequests.__init__

    def other(self, config, *others):
        init(self, replace(config, slots=replace(config.slots, **rules)), *others)

    patch.setattr(SlottedRequests, "__init__", other)


def expects_nothing_of_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetractingRequests, "num_expected", lambda self, request: 0)


def keeps_its_first_estimate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RetractingRequests, "_decay", lambda self, num_steps: None)


def retracts_the_longest_answers(patch: pytest.MonkeyPatch) -> None:
    send_back = RetractingRequests._send_back

    def other(self, victim, plan):
        running = [request for request in self.requests if request.num_output_tokens and request is not victim]
        longest = max(running, key=lambda request: request.num_output_tokens, default=victim)
        send_back(self, longest, plan)

    patch.setattr(RetractingRequests, "_send_back", other)


def keeps_tokens_in_flight(patch: pytest.MonkeyPatch) -> None:
    send_back = RetractingRequests._send_back

    def keeping(self, victim, plan):
        in_flight = victim.num_promised_tokens - victim.num_output_tokens
        victim.num_output_tokens += in_flight
        send_back(self, victim, plan)

    patch.setattr(RetractingRequests, "_send_back", keeping)


def evicts_the_newest(patch: pytest.MonkeyPatch) -> None:
    touch = RadixKVBlocks._offer

    def offer(self, node):
        node.last_access = -node.last_access
        touch(self, node)

    patch.setattr(RadixKVBlocks, "_offer", offer)


def evicts_only_what_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RadixKVBlocks, "want", lambda self, num_blocks: None)


def splits_without_a_look(patch: pytest.MonkeyPatch) -> None:
    split = RadixKVBlocks._split

    def quiet(self, child, length):
        before = child.last_access
        parent = split(self, child, length)
        child.last_access = before
        return parent

    patch.setattr(RadixKVBlocks, "_split", quiet)


def never_looks_after_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config

    def rarely(*given):
        made = config(*given)
        return replace(made, estimates=made.estimates and replace(made.estimates, refresh_every=10**9))

    patch.setattr(plans, "engine_scheduler_config", rarely)


def serves_duplicates_at_once(patch: pytest.MonkeyPatch) -> None:
    config = plans.engine_scheduler_config

    def at_once(*given):
        made = config(*given)
        return replace(made, estimates=made.estimates and replace(made.estimates, duplicate_tokens=10**6))

    patch.setattr(plans, "engine_scheduler_config", at_once)


def forgets_the_weights_of_subtrees(patch: pytest.MonkeyPatch) -> None:
    children_first = admission._children_first
    patch.setattr(admission, "_children_first", lambda blocks, weights=None: children_first(blocks))


# Of layers that keep different parts of a sequence.


def gives_up_what_a_step_under_way_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RunningRequests, "_num_in_flight", lambda self, request: 0)
    due = DecodeCohort.due_to_release
    patch.setattr(DecodeCohort, "due_to_release", lambda self, num_in_flight: due(self, 0))


def gives_up_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupedKVBlocks, "release", lambda self, request, num_done: None)


def gives_up_a_token_late(patch: pytest.MonkeyPatch) -> None:
    release = GroupedKVBlocks.release
    patch.setattr(GroupedKVBlocks, "release", lambda self, request, num_done: release(self, request, num_done - 1))


def wants_a_row_more_before_a_hit(patch: pytest.MonkeyPatch) -> None:
    longest = GroupedKVBlocks._longest

    def strict(self, *of):
        groups = self.groups
        self.groups = tuple(
            replace(group, span=group.span + self.block_size) if group.span and not group.is_chunk else group
            for group in groups
        )
        try:
            return longest(self, *of)
        finally:
            self.groups = groups

    patch.setattr(GroupedKVBlocks, "_longest", strict)


def admits_as_if_all_were_kept(patch: pytest.MonkeyPatch) -> None:
    taken = GroupedKVBlocks._num_taken
    patch.setattr(GroupedKVBlocks, "_num_taken", lambda self, *of, is_whole: taken(self, *of, is_whole=False))


# Of drafters that have KV of their own.


def _without(name: str, patch: pytest.MonkeyPatch) -> None:
    with_drafter = plans.with_drafter
    patch.setattr(plans, "with_drafter", lambda *of: replace(with_drafter(*of), **{name: 0}))


def keeps_no_slots_for_drafts(patch: pytest.MonkeyPatch) -> None:
    _without("num_lookahead", patch)


def takes_nothing_of_the_budget_for_a_draft_model(patch: pytest.MonkeyPatch) -> None:
    _without("num_input_tokens", patch)


def reads_hidden_states_from_the_cache(patch: pytest.MonkeyPatch) -> None:
    _without("rereads_last_block", patch)


def leaves_a_block_out_in_every_round(patch: pytest.MonkeyPatch) -> None:
    longest = GroupedKVBlocks._longest
    patch.setattr(
        GroupedKVBlocks, "_longest", lambda self, *of: longest(self, *of[:-1], leaves_one=self.rereads_last_block)
    )


# Of LoRA adapters.


def admits_any_adapter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterSlots, "admits", lambda self, request, scheduled: True)


def counts_adapters_of_all_that_run(patch: pytest.MonkeyPatch) -> None:
    """One whose last token is in flight is in no further step, so its adapter takes no slot of that."""
    admit = Scheduler._admit

    def with_all(self, plan, *of):
        running = {request.adapter for request in self._running.requests} - {None}
        patch.setattr(AdapterSlots, "scheduled", lambda *_: set(running))
        return admit(self, plan, *of)

    patch.setattr(Scheduler, "_admit", with_all)


def lets_the_skipped_go_last(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_skip", lambda self, key, request: ((1 << 50, *key), request))


def shares_blocks_between_adapters(patch: pytest.MonkeyPatch) -> None:
    requests_of = plans._requests_of

    def alike(case, spec, **has_hashes):
        result = requests_of(case, spec, **has_hashes)
        for request in result.values():
            request.contents = request.block_hashes = tuple(
                block[:3] if block[0] == "group" else block for block in request.block_hashes
            )
        return result

    patch.setattr(plans, "_requests_of", alike)


# Of answers of a required shape, and of drafts of any length.


def _with_requests(patch: pytest.MonkeyPatch, **fields: object) -> None:
    requests_of = plans._requests_of

    def changed(*of, **named):
        result = requests_of(*of, **named)
        for request in result.values():
            for name, value in fields.items():
                setattr(request, name, value)
        return result

    patch.setattr(plans, "_requests_of", changed)


def keeps_shapes_in_line(patch: pytest.MonkeyPatch) -> None:
    """Those with a shape would wait behind all that came before."""
    _with_requests(patch, grammar=None)


def needs_no_grammar(patch: pytest.MonkeyPatch) -> None:
    _with_requests(patch, awaits_grammar=False)


def waits_behind_a_grammar(patch: pytest.MonkeyPatch) -> None:
    """Nobody would pass a request whose grammar is being compiled."""
    admit = Scheduler._admit

    def in_line(self, plan, *of):
        is_held = self._waiting and self._waiting[0][1].awaits_grammar
        return 0 if is_held else admit(self, plan, *of)

    patch.setattr(Scheduler, "_admit", in_line)


def drafts_all_the_way(patch: pytest.MonkeyPatch) -> None:
    init = DraftingRequests.__init__

    def without(self, *of):
        init(self, *of)
        self._by_match = ()

    patch.setattr(DraftingRequests, "__init__", without)


# Of images.


def encodes_as_much_as_it_likes(patch: pytest.MonkeyPatch) -> None:
    _with_encoder(patch, budget=10**6)


def caches_as_much_as_it_likes(patch: pytest.MonkeyPatch) -> None:
    _with_encoder(patch, cache_size=10**6)


def cuts_whole_images(patch: pytest.MonkeyPatch) -> None:
    _with_encoder(patch, is_whole=False)


def _with_encoder(patch: pytest.MonkeyPatch, **rules: object) -> None:
    init = EncoderCache.__init__
    patch.setattr(EncoderCache, "__init__", lambda self, own: init(self, replace(own, **rules)))


def keeps_images_to_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EncoderCache, "release", lambda self, plan: False)


def drops_the_newest_image(patch: pytest.MonkeyPatch) -> None:
    make_room = EncoderCache._make_room

    def newest_first(self, num_tokens):
        self._unneeded = dict(reversed(self._unneeded.items()))
        try:
            return make_room(self, num_tokens)
        finally:
            self._unneeded = dict(reversed(self._unneeded.items()))

    patch.setattr(EncoderCache, "_make_room", newest_first)


def encodes_equal_images_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EncoderCache, "_need", lambda self, request, number: number in self._held.get(request, ()))


# Recording -> how many of its cases are replayed, one in so many, and the rules.
WRONG_RULES = {
    "vllm_0.30.0": (
        (700, 2),
        (
            admits_on_the_first_chunk,
            finds_the_last_token,
            forgets_copies,
            forgets_own_blocks,
            goes_on_after_giving_way,
            ignores_the_threshold,
            names_tokens_in_flight,
            reuses_first_blocks_first,
            reuses_in_order_of_freeing,
            serves_the_longest_wait_first,
        ),
    ),
    "vllm_0.30.0_windows": (
        (400, 1),
        (
            admits_as_if_all_were_kept,
            gives_up_a_token_late,
            gives_up_nothing,
            gives_up_what_a_step_under_way_reads,
            wants_a_row_more_before_a_hit,
        ),
    ),
    "vllm_0.30.0_offload": (
        (105, 1),
        (
            copies_at_the_first_offer,
            copies_only_what_is_evicted,
            loads_short_of_the_last_token,
            loads_what_another_loads,
            offers_no_block_that_the_device_had,
        ),
    ),
    "vllm_0.30.0_transfer": (
        (440, 1),
        (
            cuts_whole_prompts,
            frees_before_it_is_fetched,
            hides_what_has_come,
            loads_what_prompts_need,
            loads_without_a_slot,
            preempts_in_flight,
            takes_lost_blocks_for_loaded,
        ),
    ),
    "vllm_0.30.0_async-speculation": (
        (300, 1),
        (forgets_drafts_under_way, names_drafts_under_way, stops_drafting_at_the_end),
    ),
    "vllm_0.30.0_drafters": (
        (299, 1),
        (
            keeps_no_slots_for_drafts,
            leaves_a_block_out_in_every_round,
            reads_hidden_states_from_the_cache,
            takes_nothing_of_the_budget_for_a_draft_model,
        ),
    ),
    "vllm_0.30.0_lora": (
        (120, 1),
        (
            admits_any_adapter,
            counts_adapters_of_all_that_run,
            lets_the_skipped_go_last,
            shares_blocks_between_adapters,
        ),
    ),
    "vllm_0.30.0_images": (
        (120, 1),
        (
            caches_as_much_as_it_likes,
            cuts_whole_images,
            drops_the_newest_image,
            encodes_as_much_as_it_likes,
            encodes_equal_images_again,
            keeps_images_to_the_end,
        ),
    ),
    "vllm_0.30.0_shapes": (
        (105, 1),
        (drafts_all_the_way, keeps_shapes_in_line, needs_no_grammar, waits_behind_a_grammar),
    ),
    "vllm_0.30.0_suffix": ((105, 1), (drafts_all_the_way,)),
    "vllm_0.30.0_pooling": ((120, 1), (cuts_whole_prompts, generates_after_the_prompt)),
    "sglang_0.5.23": (
        (1080, 1),
        (
            evicts_only_what_is_taken,
            evicts_the_newest,
            expects_nothing_of_others,
            forgets_the_weights_of_subtrees,
            keeps_its_first_estimate,
            keeps_tokens_in_flight,
            never_looks_after_those_that_wait,
            retracts_the_longest_answers,
            serves_duplicates_at_once,
            splits_without_a_look,
        ),
    ),
    "llama.cpp_11549": (
        (180, 1),
        (
            calls_in_order,
            grants_prompts_as_they_came,
            keeps_unified_slots_full,
            loads_the_least_wanted,
            saves_no_prompts,
            starts_with_the_first_slot,
            takes_any_likeness,
        ),
    ),
}
PLANTED = [(recording, rule) for recording, (_, rules) in WRONG_RULES.items() for rule in rules]


@pytest.mark.release
@pytest.mark.parametrize(("recording", "plant"), PLANTED)
def test_a_wrong_rule_is_noticed(recording: str, plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(_differs(case, recording) for case in _cases(recording))


@cache
def _cases(recording: str) -> list[RecordedCase]:
    (most, step), _ = WRONG_RULES[recording]
    cases = json.loads(gzip.decompress((MEASURED / f"{recording}.json.gz").read_bytes()))["cases"]
    if recording.startswith("sglang"):
        cases.sort(key=lambda case: case["config"]["scheduling_policy"] == "fcfs")  # the others are few
    return [RecordedCase.model_validate(case) for case in cases[:most:step]]


def _differs(case: RecordedCase, recording: str) -> bool:
    engine, version = recording.split("_")[:2]
    try:
        slots: dict[int, int] = {}
        steps = list(replay(case, engine, version, slots))
    except (AssertionError, IndexError, KeyError, ValueError):  # a wrong rule may also lose a block
        return True
    return plans._difference(steps, case, slots) is not None
