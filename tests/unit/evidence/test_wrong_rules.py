"""Each rule of an engine's scheduler that we could get wrong is noticed by the replay of its recorded plans."""

import gzip
import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

from perfmodel.engine import GroupedKVBlocks, HostBlocks, KVBlockManager, RadixKVBlocks, Scheduler, admission
from perfmodel.engine.adapters import AdapterSlots
from perfmodel.engine.drafting import DraftingRequests as Drafting
from perfmodel.engine.encoder_cache import EncoderCache
from perfmodel.engine.estimating import RetractingRequests as Retracting
from perfmodel.engine.running import RunningRequests as Running
from perfmodel.engine.slots import SlottedRequests as Slotted
from perfmodel.engine.tiered_blocks import TieredBlocks
from perfmodel.evidence.kinds import plans
from perfmodel.evidence.kinds.plans import RecordedCase, replay
from perfmodel.sim.replica.serving import engine_scheduler_config as config_of
from perfmodel.sim.traffic.draft_lengths import with_drafter

MEASURED = Path(__file__).parents[3] / "measurements" / "plans"


class Wrong(NamedTuple):
    """A wrong rule: a part of the source of `function`, which it has once, and what stands there instead."""

    function: Callable[..., Any]
    before: str
    after: str

    def body(self) -> CodeType:
        function, own = inspect.unwrap(self.function), inspect.getsource(self.function)
        assert own.count(self.before) == 1
        module = inspect.getsource(inspect.getmodule(function)).replace(own, own.replace(self.before, self.after))
        codes = [compile(module, function.__code__.co_filename, "exec", dont_inherit=True)]
        for code in codes:
            codes += [item for item in code.co_consts if isinstance(item, CodeType)]
        return next(code for code in codes if code.co_qualname == function.__qualname__)


LONGEST = "victim = max(self.requests, key=lambda one: (one is not victim, one.num_output_tokens)); "
IN_FLIGHT = "in_flight = victim.num_promised_tokens"
ESTIMATES = "rules.estimates.model_dump()"
ALL_THE_WAY = Wrong(Drafting.__init__, "config.speculation.depth_by_match", "()")
WHOLE_PROMPTS = Wrong(config_of, "rules.chunks_prompts", "True")
# Recording -> how many of its cases are replayed, one in so many, and the rules.
WRONG_RULES = {
    "vllm_0.30.0": (
        (700, 2),
        {
            "admits on the first chunk": Wrong(config_of, "engine.scheduler_reserve_full_isl", "False"),
            "finds the last token": Wrong(
                KVBlockManager.cached_prefix, "(request.num_tokens - 1)", "request.num_tokens"
            ),
            "forgets copies": Wrong(KVBlockManager._enter, "if content in self._block_of:", "if False:"),
            "forgets own blocks": Wrong(KVBlockManager.publish_own, "not self.enable_prefix_caching", "True"),
            "spares the request itself": Wrong(
                Running._make_room, "key=self._key)", "key=lambda one: (one is not request, self._key(one)))"
            ),
            "ignores the threshold": Wrong(Running.chunk, "self.caps_prompts", "False"),
            "names tokens in flight": Wrong(Running.num_known_tokens, "_tokens - in_flight", "_tokens"),
            "reuses first blocks first": Wrong(
                KVBlockManager._give_back, "not blocks:", "not (blocks := blocks[::-1]):"
            ),
            "reuses in order of freeing": Wrong(KVBlockManager.__init__, "= reuses_partial_first and", "= False and"),
            "serves the longest wait first": Wrong(config_of, "=engine.scheduling_policy", "='fcfs'"),
        },
    ),
    "vllm_0.30.0_windows": (
        (400, 1),
        {
            "admits as if all were kept": Wrong(GroupedKVBlocks._num_taken, "if is_whole and", "if False and"),
            "gives up a token late": Wrong(GroupedKVBlocks.release, "first_row(num_done,", "first_row(num_done - 1,"),
            "gives up nothing": Wrong(GroupedKVBlocks.release, "if tables is None:", "if True:"),
            "gives up what a step under way reads": Wrong(Running._num_in_flight, "return count", "return 0"),
            "wants a row more before a hit": Wrong(GroupedKVBlocks._longest, "+ leaves_one", "+ leaves_one + 1"),
        },
    ),
    "vllm_0.30.0_offload": (
        (105, 1),
        {
            "copies at the first offer": Wrong(TieredBlocks._offer, "self._store_after == 1", "True"),
            "copies only what is evicted": Wrong(TieredBlocks._offer, "request.name_blocks(last)[first:]", "()"),
            "loads short of the last token": Wrong(HostBlocks.num_reusable, "(not self.is_async)", "1"),
            "loads what another loads": Wrong(TieredBlocks.must_wait, "if content in self._loading:", "if False:"),
            "offers no block that the device had": Wrong(TieredBlocks.restore, "> num_cached:  #", ">= 0:  #"),
        },
    ),
    "vllm_0.30.0_transfer": (
        (440, 1),
        {
            "cuts whole prompts": WHOLE_PROMPTS,
            "frees before it is fetched": Wrong(
                Scheduler.add, "self.check_can_ever_run(request)", "request.keeps_blocks = False"
            ),
            "waits for a lost load again": Wrong(
                Scheduler._take_load, "num_transferred_tokens = 0", "num_transferred_tokens += 0"
            ),
            "loads what prompts need": Wrong(Running.num_reserved_blocks, "request.last_step < 0", "False"),
            "loads without a slot": Wrong(config_of, "rules.loads_need_slot", "False"),
            "preempts in flight": Wrong(Running.is_in_flight, "num_granted = plan", "return False and plan"),
            "takes lost blocks for loaded": Wrong(Scheduler.finish_load, "num_tokens is not None", "False"),
        },
    ),
    "vllm_0.30.0_async-speculation": (
        (300, 1),
        {
            "forgets drafts under way": Wrong(Drafting._grant_decode, "if depth:", "if False:"),
            "names drafts under way": Wrong(
                Drafting.num_known_tokens,
                "super().num_known_tokens(request)",
                "super() and request.num_computed_tokens",
            ),
            "stops drafting at the end": Wrong(Drafting._depth_before_end, "not self._speculation.past_end", "True"),
        },
    ),
    "vllm_0.30.0_drafters": (
        (299, 1),
        {
            "keeps no slots for drafts": Wrong(with_drafter, "speculation.depth", "0"),
            "leaves a block out in every round": Wrong(
                GroupedKVBlocks._longest, "+ leaves_one", "+ self.rereads_last_block"
            ),
            "reads hidden states from the cache": Wrong(with_drafter, "_block=reads_model", "_block=False"),
            "takes nothing of the budget for a draft model": Wrong(with_drafter, "else 1", "else 0"),
        },
    ),
    "vllm_0.30.0_lora": (
        (120, 1),
        {
            "admits any adapter": Wrong(AdapterSlots.admits, "request.adapter is None", "True"),
            # One whose last token is in flight is in no further step, so its adapter takes no slot of that.
            "counts adapters of all that run": Wrong(
                Scheduler._admit,
                "adapters.scheduled(plan, self._running.cohort.members)",
                "{one.adapter for one in self._running.requests} - {None}",
            ),
            "lets the skipped go last": Wrong(Scheduler._skip, "(self._num_skipped - 2 * _MANY,)", "(1 << 50, *key)"),
            "shares blocks between adapters": Wrong(plans._requests_of, "recorded.adapter,", "None,"),
        },
    ),
    "vllm_0.30.0_images": (
        (120, 1),
        {
            "caches as much as it likes": Wrong(EncoderCache.__init__, "rules.cache_size", "10**6"),
            "cuts whole images": Wrong(EncoderCache.fit, "self._rules.is_whole", "False"),
            "drops the newest image": Wrong(
                EncoderCache._make_room, "iter(self._unneeded)", "reversed(self._unneeded)"
            ),
            "encodes as much as it likes": Wrong(EncoderCache.fit, "self._rules.budget", "10**6"),
            "encodes equal images again": Wrong(
                EncoderCache._need, "content not in self._needed_by", "number not in self._held.get(request, ())"
            ),
            "keeps images to the end": Wrong(EncoderCache.release, "inputs[number].end <= num_done", "False"),
        },
    ),
    "vllm_0.30.0_encode-pools": (
        (105, 1),
        {
            "counts what others encode": Wrong(EncoderCache.fit, "0 if item.is_external else", ""),
            "encodes what others have": Wrong(plans._requests_of, "image[2] < extras.num_encoded", "False"),
            "keeps what it has encoded to its last step": Wrong(Scheduler.apply, "encoder.is_alone", "encoder is None"),
            "stops before images of others": Wrong(
                EncoderCache.fit, "item.num_tokens > budget_left", "num_chosen > self._budget_left"
            ),
        },
    ),
    "vllm_0.30.0_shapes": (
        (105, 1),
        {
            "drafts all the way": ALL_THE_WAY,
            "keeps shapes in line": Wrong(plans._requests_of, "= 0, recorded.grammar", "= None, recorded.grammar"),
            "needs no grammar": Wrong(plans._requests_of, "recorded.grammar_steps > 0", "False"),
            "waits behind a grammar": Wrong(
                Scheduler._admit,
                "while self._waiting and",
                "while self._waiting and not self._waiting[0][1].awaits_grammar and",
            ),
        },
    ),
    "vllm_0.30.0_suffix": ((105, 1), {"drafts all the way": ALL_THE_WAY}),
    "vllm_0.30.0_pooling": (
        (120, 1),
        {
            "cuts whole prompts": WHOLE_PROMPTS,
            "generates after the prompt": Wrong(plans._requests_of, "recorded.output,", "recorded.output + 1,"),
        },
    ),
    "sglang_0.5.23": (
        (1080, 1),
        {
            "evicts only what is taken": Wrong(RadixKVBlocks.want, "self._wanted = max", "_ = max"),
            "evicts the newest": Wrong(RadixKVBlocks._offer, "add(node)", "add(node); node.last_access *= -1"),
            "expects nothing of others": Wrong(Retracting.num_expected, "return left", "return 0"),
            "forgets the weights of subtrees": Wrong(admission._children_first, "weights is not None", "False"),
            "keeps its first estimate": Wrong(Retracting._decay, "while num_steps", "while False"),
            "keeps tokens in flight": Wrong(Retracting._send_back, "num_promised_tokens -=", "num_output_tokens +="),
            "never looks after those that wait": Wrong(
                config_of, ESTIMATES, f"{ESTIMATES} | {{'refresh_every': 10**9}}"
            ),
            "retracts the longest answers": Wrong(Retracting._send_back, IN_FLIGHT, LONGEST + IN_FLIGHT),
            "serves duplicates at once": Wrong(config_of, ESTIMATES, f"{ESTIMATES} | {{'duplicate_tokens': 10**6}}"),
            "splits without a look": Wrong(RadixKVBlocks._split, "self._touch(child)", "pass"),
        },
    ),
    "llama.cpp_11549": (
        (180, 1),
        {
            "calls in order": Wrong(Scheduler._fill_slots, "= min(self._num_deferred, len(called))", "= 0"),
            "grants prompts as they came": Wrong(
                Slotted._chunks, "in self._prompts:", "in sorted(self._prompts, key=lambda one: one.request_id):"
            ),
            "keeps unified slots full": Wrong(Slotted.take_slot, "self._slots.is_unified", "False"),
            "loads the least wanted": Wrong(Slotted._load, "kept >= _MIN_KEPT", "True"),
            "saves no prompts": Wrong(Slotted._save, "not held", "True"),
            "starts with the first slot": Wrong(Slotted._choose, "-number", "number"),
            "takes any likeness": Wrong(Slotted._choose, "self._slots.least_similarity * num_tokens", "0.0"),
        },
    ),
}
PLANTED = [(recording, rule) for recording, (_, rules) in WRONG_RULES.items() for rule in rules]


@pytest.mark.release
@pytest.mark.parametrize(("recording", "rule"), PLANTED)
def test_a_wrong_rule_is_noticed(recording: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = WRONG_RULES[recording][1][rule]
    monkeypatch.setattr(inspect.unwrap(wrong.function), "__code__", wrong.body())
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
