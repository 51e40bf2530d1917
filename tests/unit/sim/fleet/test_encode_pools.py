"""Encode pools: each image is encoded once, elsewhere, and a prompt starts when its features are there."""

from types import SimpleNamespace

import pytest

from perfmodel.cost import plan_memory, step_costs
from perfmodel.engine import EncoderInput, EncoderRules, KVBlockManager, Request, Scheduler, SchedulerConfig
from perfmodel.errors import PerfmodelError
from perfmodel.models.vision import ImageGrid
from perfmodel.ops.work import BatchShape
from perfmodel.sim import RunResult, simulate
from perfmodel.sim.clock import TICKS_PER_S, TickEnvironment
from perfmodel.sim.fleet.encoding import EncodingServer, feature_bytes
from perfmodel.specs import Scenario, load_model, load_scenario

NAME = "qwen3-vl-4b-a100-encode-pool"
# 640 x 640 pixels in patches of 16, merged 2 x 2: 20 x 20 tokens; a vector and three of DeepStack of 2,560 x 2 bytes
TOKENS, TOKEN_BYTES = 400, 4 * 2560 * 2
POOLS = "cluster.pools=[{role: encode}, {replicas: 1}]"
ALONE = ("traffic.num_requests=1", "traffic.images.per_request=1", POOLS)


def load(*changes: str) -> Scenario:
    return load_scenario(NAME, ["traffic.num_requests=40", *changes])


def run(*changes: str) -> RunResult:
    return simulate(load(*changes), intervals=False)


def test_each_image_is_moved_once() -> None:
    summary = run().summary
    assert summary["completed"] == 40
    assert summary["ec_transfer"]["transfers"] == 40 * 4
    assert summary["ec_transfer"]["bytes"] == 40 * 4 * TOKENS * TOKEN_BYTES
    assert [(pool["role"], pool["num_devices"]) for pool in summary["pools"]] == [("encode", 1), ("unified", 3)]


@pytest.mark.parametrize(("model", "vectors"), [("qwen3-vl-4b", 4), ("qwen2.5-vl-7b", 1), ("gemma-3-27b", 1)])
def test_a_token_has_a_vector_and_those_of_deepstack(model: str, vectors: int) -> None:
    """Qwen3-VL's card names three layers in deepstack_visual_indexes; the others have none."""
    card = load_model(model)
    assert feature_bytes(card) == vectors * card.hidden_size * 2


def encoding_seconds(scenario: Scenario) -> float:
    """A step of the scenario's encode engine with one image of 640 x 640 pixels."""
    own = scenario.of_pool(scenario.pools[0])
    shape = BatchShape(TOKENS, 1, ((TOKENS, 0),), images=(ImageGrid(1, 40, 40),))
    return step_costs(own).estimate(shape).duration_s


def test_a_first_token_waits_for_front_end_encoding_and_transfer() -> None:
    """A lone request with one image: beside what it takes with as many tokens of text, the encoder's step, the
    transfer, and the front end of the encode engine, whose time a transfer of no bytes and a step leave over."""
    seen = run(*ALONE).summary["mean_ttft_ms"]
    at_once = run(*ALONE, "cluster.ec_transfer={link: x, bandwidth_bytes_per_s: 1e18, latency_s: 0}").summary
    moved_ms = 1e3 * (1e-3 + TOKENS * TOKEN_BYTES / 5e9)
    assert seen - at_once["mean_ttft_ms"] == pytest.approx(moved_ms, rel=1e-6)
    text = load(
        *ALONE[:1], "cluster={replicas: 1}", "traffic.images=null", f"traffic.input_tokens.value={TOKENS + 402}"
    )
    read_ms = simulate(text, intervals=False).summary["mean_ttft_ms"]
    added_ms, step_ms = at_once["mean_ttft_ms"] - read_ms, 1e3 * encoding_seconds(load(*ALONE))
    assert step_ms < added_ms < step_ms + read_ms


def test_an_engine_that_encodes_computes_no_text_and_one_that_answers_no_image() -> None:
    scenario = load()
    encoder = step_costs(scenario.of_pool(scenario.pools[0])).graph
    assert encoder.nodes
    assert all(node.name.startswith("encoder_") for node in encoder.nodes)
    few = ("traffic.num_requests=8", "traffic.arrivals={process: closed_loop, concurrency: 1}")
    images = run(*few)
    words = simulate(
        load(*few, "cluster={replicas: 1}", "traffic.images=null", f"traffic.input_tokens.value={400 + 4 * 402}"),
        intervals=False,
    )
    assert images.summary["mean_tpot_ms"] == pytest.approx(words.summary["mean_tpot_ms"], rel=1e-9)


class Receiver:
    """Keeps what it is passed."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        self.requests.append(request)


def test_requests_without_images_pass_by() -> None:
    receiver, request = Receiver(), Request(0, 0, 10, 1)
    EncodingServer(TickEnvironment(), load(), lambda _: receiver).add(request)  # type: ignore[arg-type,return-value]
    assert receiver.requests == [request]


def test_features_of_an_engine_leave_one_after_another_and_are_awaited_together() -> None:
    """Two images that one step has encoded are there after two transfers; the prompt then encodes neither again."""
    env, receiver, engine = TickEnvironment(), Receiver(), SimpleNamespace(index=0, add=lambda image: None)
    server = EncodingServer(env, load(), lambda _: receiver)  # type: ignore[arg-type,return-value]
    images: list[Request] = []
    engine.add = images.append
    server.join(SimpleNamespace(route=lambda _: engine))  # type: ignore[arg-type]
    request = Request(0, 0, 1000, 1)
    request.encoder_inputs = (EncoderInput(1, TOKENS, "a"), EncoderInput(500, TOKENS, "b"))
    server.add(request)
    for image in images:
        assert receiver.requests == []
        server.on_encoded(engine, image)  # type: ignore[arg-type]
    env.run_until_idle()
    assert receiver.requests == [request]
    assert all(item.is_external for item in request.encoder_inputs)
    assert env.ticks == pytest.approx(2 * (1e-3 + TOKENS * TOKEN_BYTES / 5e9) * TICKS_PER_S, rel=1e-9)
    assert [(image.num_prompt_tokens, image.encoder_inputs[0].offset) for image in images] == [(TOKENS, 0)] * 2


def test_encoders_come_before_prefill_and_decode() -> None:
    summary = run("cluster.pools=[{role: encode}, {role: prefill}, {role: decode}]").summary
    assert summary["completed"] == 40
    assert summary["kv_transfer"]["transfers"] == 40
    assert summary["ec_transfer"]["transfers"] == 160


def test_the_busy_encoder_sets_the_pace_and_another_halves_its_load() -> None:
    """With all images there at once the encoder is hardly idle: two need about half as long."""
    burst = ("traffic.arrivals={process: burst}", "traffic.output_tokens.value=1", "traffic.input_tokens.value=1")
    one, two = (
        run(*burst, f"cluster.pools=[{{role: encode, replicas: {count}}}, {{replicas: 12}}]") for count in (1, 2)
    )
    assert one.summary["pools"][0]["busy_share"] > 0.8
    assert 1.6 < one.summary["duration"] / two.summary["duration"] < 2.0


def test_memory_holds_the_encoder_alone() -> None:
    scenario = load()
    own = scenario.of_pool(scenario.pools[0])
    plan = plan_memory(own.model, own.hardware, own.engine)
    assert plan.weights == {"other": own.model.extra_params * 2}
    assert plan.kv_bytes_per_token == 0
    assert plan.kv_bytes == 0


def test_features_from_elsewhere_take_room_and_no_budget() -> None:
    """A step encodes 100 tokens at most. Two images of 100 from elsewhere come in one step; the cache holds two."""
    rules = EncoderRules(100, 200, is_whole=False, is_ahead=False)
    config = SchedulerConfig(max_model_len=4096, encoder=rules)
    for is_external, lengths in ((True, [110, 110]), (False, [110, 10])):
        scheduler = Scheduler(config, KVBlockManager(1000, 16))
        for number in (0, 1):
            request = Request(number, number, 110, 1)
            request.encoder_inputs = (EncoderInput(10, 100, number, None, is_external),)
            scheduler.add(request)
        plan = scheduler.plan(0)
        assert [grant.num_new_tokens for grant in plan.chunks] == lengths
        assert len(plan.encoded) == (0 if is_external else 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cluster.pools=[{role: encode}]", "got encode pools alone"),
        (
            "cluster.pools=[{role: encode, autoscaling: {max_replicas: 2, target: 1}}, {}]",
            "beside a gateway, autoscaling",
        ),
        ("cluster.gateway={timeout_s: 5}", "beside a gateway, autoscaling"),
        ("cluster.pools=[{role: encode, engine: {data_parallel_size: 2}}, {}]", "2 devices an engine"),
        ("traffic.images=null", "encode pool without traffic.images"),
        ("cluster.pools=[{}]", "ec_transfer without an encode pool"),
        ("engine.mm_encoder_only=true", "mm_encoder_only for an engine that answers"),
    ],
)
def test_what_encode_pools_do_not_go_with_is_refused(change: str, sentence: str) -> None:
    with pytest.raises(PerfmodelError, match=sentence):
        load(change)


def test_loads_of_one_prompt_take_no_budget_together() -> None:
    """A step encodes 100 tokens at most. A prompt with three images of 100 from elsewhere comes in one step all the
    same, also if the last is encoded here; behind one that is encoded here no image is within what is left."""
    config = SchedulerConfig(max_model_len=4096, encoder=EncoderRules(100, 1000, is_ahead=False))
    for own, length in (((), 330), ((2,), 330), ((1,), 230)):
        scheduler, request = Scheduler(config, KVBlockManager(1000, 16)), Request(0, 0, 330, 1)
        request.encoder_inputs = tuple(
            EncoderInput(110 * number + 10, 100, number, None, number not in own) for number in range(3)
        )
        scheduler.add(request)
        plan = scheduler.plan(0)
        assert [grant.num_new_tokens for grant in plan.chunks] == [length]
        assert len(plan.encoded) == len(own)


def test_an_image_that_two_steps_share_is_done_with_the_first() -> None:
    """60 of 100 tokens a step: the encoder runs in the first, and planned ahead the request ends with it; else with the
    second, as its outcome is known before the rest is planned. No request ends twice."""
    for is_ahead, ends in ((True, 0), (False, 1)):
        rules = EncoderRules(200, 200, is_ahead=is_ahead, is_alone=True)
        scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=60, encoder=rules), KVBlockManager(100, 16))
        request = Request(0, 0, 100, 1)
        request.encoder_inputs = (EncoderInput(0, 100, "a"),)
        scheduler.add(request)
        plans, finished = [scheduler.plan(0)], list[list[Request]]()
        for step in range(2):
            plans += [scheduler.plan(step)] if is_ahead or step else []
            finished.append(scheduler.apply(plans[step], step))
        assert finished == [[request] if step == ends else [] for step in range(2)]
        assert not scheduler.has_requests
