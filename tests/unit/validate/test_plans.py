"""Our scheduler decides as the engines' own did: recordings replayed, and what a wrong rule would change."""

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.engine import KVBlockManager, RadixKVBlocks, Scheduler, waiting_order
from perfmodel.engine.drafting import DraftingRequests
from perfmodel.engine.retracting import RetractingRequests
from perfmodel.engine.running import RunningRequests
from perfmodel.engine.slots import SlottedRequests
from perfmodel.errors import SpecError
from perfmodel.validate import plans
from perfmodel.validate.plans import RecordedCase, replay, validate_plans

RECORDINGS = sorted((Path(__file__).parents[3] / "measurements" / "plans").glob("*.json.gz"))
CITED = Path(__file__).parents[4] / "shared" / "truth" / "plans" / "vllm_0.30.0.json.gz"
SMALL = {
    "config": {"max_num_seqs": 2, "max_num_batched_tokens": 8, "block_size": 4, "max_model_len": 64, "num_blocks": 8},
    "requests": [{"arrival": 0, "prompt": 10, "output": 2}],
    "steps": [[0, [[0, 0, 8]], []], [1, [[0, 8, 2]], []], [2, [[0, 10, 1]], []]],
}


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda file: file.name.removesuffix(".json.gz"))
def test_all_plans_of_all_recorded_workloads_are_equal(recording: Path) -> None:
    report = validate_plans(str(recording))
    assert report.rows == report.covered == report.equal > 100, report.worst[:1]


def test_the_recording_of_the_newest_engine_exercises_all_rules() -> None:
    by = validate_plans(str(next(file for file in RECORDINGS if file.name == "vllm_0.30.0.json.gz"))).by
    assert sum(group["rows"] for name, group in by.items() if name.startswith("vllm")) >= 2000
    for feature in ("async scheduling", "prefix caching", "priority", "preemption", "aborts", "pipeline stages"):
        assert by[feature]["rows"] >= 300, feature
    assert by["speculation"]["rows"] >= 300
    assert by["KV groups"]["rows"] >= 300


@pytest.mark.skipif(not CITED.exists(), reason="the cited recording is not beside this checkout")
def test_the_cited_recording_is_equal_too() -> None:
    report = validate_plans(str(CITED))
    assert report.equal == report.rows == 400


# ------------------------------------------------------------------ wrong rules


def finds_the_last_token(patch: pytest.MonkeyPatch) -> None:
    def cached_prefix(self, request):
        blocks = []
        self._pop_set_aside()
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


NEW_WRONG_RULES = (
    cuts_whole_prompts,
    forgets_drafts_under_way,
    frees_before_it_is_fetched,
    hides_what_has_come,
    loads_what_prompts_need,
    loads_without_a_slot,
    names_drafts_under_way,
    preempts_in_flight,
    stops_drafting_at_the_end,
    takes_lost_blocks_for_loaded,
)
WRONG_RULES = (
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
)


def _cases(name: str) -> list[RecordedCase]:
    recording = next(file for file in RECORDINGS if file.name == name)
    return [RecordedCase.model_validate(case) for case in json.loads(gzip.decompress(recording.read_bytes()))["cases"]]


@pytest.fixture(scope="module")
def workloads() -> list[RecordedCase]:
    return _cases("vllm_0.30.0.json.gz")[:700:2]


@pytest.fixture(scope="module")
def new_workloads() -> list[RecordedCase]:
    drafting = _cases("vllm_0.30.0_async-speculation.json.gz")
    return [*_cases("vllm_0.30.0_transfer.json.gz"), *drafting]


@pytest.mark.parametrize("plant", WRONG_RULES)
def test_a_wrong_rule_is_noticed(plant, workloads: list[RecordedCase], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(_differs(case) for case in workloads)


@pytest.mark.parametrize("plant", NEW_WRONG_RULES)
def test_a_wrong_rule_of_drafts_or_transfers_is_noticed(
    plant, new_workloads: list[RecordedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(_differs(case) for case in new_workloads)


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
    patch.setattr("perfmodel.engine.slots._LEAST_KEPT", 0.0)


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


WRONG_SLOT_RULES = (
    calls_in_order,
    grants_prompts_as_they_came,
    keeps_unified_slots_full,
    loads_the_least_wanted,
    saves_no_prompts,
    starts_with_the_first_slot,
    takes_any_likeness,
)


@pytest.mark.parametrize("plant", WRONG_SLOT_RULES)
def test_a_wrong_rule_of_slots_is_noticed(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = next(file for file in RECORDINGS if file.name.startswith("llama.cpp"))
    cases = [RecordedCase.model_validate(case) for case in json.loads(gzip.decompress(recording.read_bytes()))["cases"]]
    plant(monkeypatch)
    assert any(_differs(case, "llama.cpp", "11549") for case in cases)


def _differs(case: RecordedCase, engine: str = "vllm", version: str = "0.30.0") -> bool:
    try:
        slots: dict[int, int] = {}
        steps = list(replay(case, engine, version, slots))
    except (AssertionError, IndexError, KeyError, ValueError):  # a wrong rule may also lose a block
        return True
    return plans._difference_in_words(steps, case, slots) is not None


# ------------------------------------------------------------------ wrong rules of SGLang's


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
    children_first = waiting_order._children_first
    patch.setattr(waiting_order, "_children_first", lambda blocks, weights=None: children_first(blocks))


WRONG_RULES_OF_SGLANG = (
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
)


@pytest.fixture(scope="module")
def sglang_workloads() -> list[RecordedCase]:
    newest = next(file for file in RECORDINGS if "sglang" in file.name)
    cases = json.loads(gzip.decompress(newest.read_bytes()))["cases"]
    cases.sort(key=lambda case: case["config"]["scheduling_policy"] == "fcfs")  # the others are few
    return [RecordedCase.model_validate(case) for case in cases[:180] + cases[180::3]]


@pytest.mark.parametrize("plant", WRONG_RULES_OF_SGLANG)
def test_a_wrong_rule_of_sglang_is_noticed(
    plant, sglang_workloads: list[RecordedCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(_differs(case, "sglang", "0.5.23") for case in sglang_workloads)


def test_the_recording_of_sglang_exercises_its_rules(sglang_workloads: list[RecordedCase]) -> None:
    rows = Counter(feature for case in sglang_workloads for feature in plans._features_of(case))
    for feature in ("async scheduling", "prefix caching", "mixed chunks", "lpm", "dfs-weight", "lof", "priority"):
        assert rows[feature] >= 10, feature
    assert rows["preemption"] >= 10


# ------------------------------------------------------------------ the command


def _written(folder: Path, *cases: object) -> Path:
    file = folder / "plans.json"
    file.write_text(json.dumps({"engine": "vllm", "version": "0.30.0", "cases": list(cases)}))
    return file


def test_a_recording_by_hand(tmp_path: Path) -> None:
    """8 tokens a step: a prompt of 10 takes two steps, its second token the third."""
    result = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL)), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["rows"], answer["covered"], answer["equal"]) == (0, 1, 1, 1)


def test_a_run_of_equal_steps_is_one_entry(tmp_path: Path) -> None:
    """An answer of 5: its last four tokens are computed behind 10, 11, 12 and 13."""
    steps = [[0, [[0, 0, 8]], []], [1, [[0, 8, 2]], []], [2, [[0, 10, 1]], [], 3]]
    case = {**SMALL, "requests": [{"arrival": 0, "prompt": 10, "output": 5}], "steps": steps}
    assert validate_plans(str(_written(tmp_path, case))).equal == 1


def test_a_difference_is_refused_in_words_and_ends_with_1(tmp_path: Path) -> None:
    other = {**SMALL, "steps": [*SMALL["steps"][:1], [1, [[0, 8, 1]], []]]}
    result = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL, other)), "--json"])
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["equal"]) == (1, 1)
    assert answer["by"]["vllm 0.30.0"] == {"rows": 2, "equal": 1}
    worst = answer["worst"][0]
    assert (worst["case"], worst["step"]) == (1, 1)
    assert (worst["recorded"], worst["ours"]) == ("1 tokens of request 0 behind 8", "2 tokens of request 0 behind 8")
    shown = CliRunner().invoke(app, ["validate", "plans", str(_written(tmp_path, SMALL, other))])
    assert "1 of 2 cases equal" in shown.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no JSON", "expected a recording"),
        ("[]", "no list of cases"),
        ('{"cases": [{"config": {}}]}', "case 0: requests"),
        ('{"cases": [{"config": {}, "requests": [{"arrival": -1}], "steps": []}]}', "arrival"),
    ],
)
def test_what_is_no_recording_is_refused(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plans.json"
    file.write_text(content)
    with pytest.raises(SpecError, match=message):
        validate_plans(str(file))


def test_an_argument_that_we_do_not_know_is_a_note(tmp_path: Path) -> None:
    case = {**SMALL, "config": {**SMALL["config"], "max_lorys": 2}}
    report = validate_plans(str(_written(tmp_path, case)))
    assert (report.rows, report.covered) == (1, 0)
    assert "max_lorys" in report.notes[0]
