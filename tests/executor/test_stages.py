"""Pipeline stages: each has its layers, together they compute what one rank does, and plans overlap as simulated."""

from collections import Counter
from contextlib import nullcontext
from queue import Queue

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from test_expert_ranks import SHAPES, STEPS, messages  # noqa: E402
from test_parallel import BLOCK, ThreadGroup, logits, on_threads  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.ops.sharding import stages  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors import run  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.parallel.group import PipelineStage  # noqa: E402
from perfmodel_executors.parallel.ranks import Ranks, open_ranks  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import RunnerSetup  # noqa: E402

CPU = torch.device("cpu")


class ThreadStage(ThreadGroup):
    """A stage as a thread, with a queue to the next."""

    def __init__(self, stage, queues):
        super().__init__(0, 1, (None, []))
        self.stage, self._queues = stage, queues

    def all_reduce(self, partial):
        return partial

    def gather(self, shard_SV, size):
        return shard_SV

    def pass_on(self, state_2TC):
        self._queues[self.stage.number].put(state_2TC)

    def receive(self, state_2TC):
        state_2TC.copy_(self._queues[self.stage.number - 1].get(timeout=60))


def in_stages(model, num_stages):
    """Logits of each stage: none but of the last one's."""
    queues = [Queue() for _ in range(num_stages)]
    return on_threads(num_stages, lambda n: logits(model, ThreadStage(PipelineStage(n, num_stages), queues)))


@pytest.mark.parametrize("name", ["gqa", "window", "moe", "qk-norm-bias-gate"])
def test_the_last_stage_has_the_logits_of_one_rank_to_the_bit(name):
    first, last = in_stages(MODELS[name], 2)
    assert len(first) == 0
    assert torch.equal(last, logits(MODELS[name]))


def test_a_stage_holds_its_layers_and_their_keys():
    whole = Decoder(MODELS["gqa"], torch.float32, seed=1)
    parts = [
        Decoder(MODELS["gqa"], torch.float32, seed=1, group=ThreadStage(PipelineStage(n, 2), [])) for n in range(2)
    ]
    for part, mine in zip(parts, stages(2, 2), strict=True):
        assert len(part.weights.layers) == len(part.new_cache(BLOCK, 3).pages) == 1
        assert torch.equal(part.weights.layers[0].ffn.up, whole.weights.layers[mine.start].ffn.up)
    first, last = (part.weights for part in parts)
    assert torch.equal(first.embedding, whole.weights.embedding)
    assert torch.equal(last.lm_head, whole.weights.lm_head)
    assert len(first.lm_head) == len(last.embedding) == 0


@pytest.fixture(scope="module")
def two_processes():
    with open_ranks(2, CPU) as ranks:
        yield ranks


def test_processes_pass_on_what_the_simulator_counts(two_processes):
    def served(num_stages, ranks):
        engine = EngineSpec(dtype="float32", block_size=BLOCK, pipeline_parallel_size=num_stages)
        runner = ranks.runner(RunnerSetup(MODELS["gqa"], engine, 64, CPU, 1))
        clock, found = runner.new_clock(), []
        for step, shape in zip(STEPS, SHAPES, strict=True):
            runner.reserve_for(step)
            before = clock()
            found.append(runner.run(step))
            if num_stages > 1:
                assert len(runner.stage_ns) == num_stages
                assert clock() - before == sum(runner.stage_ns) > 0
                assert Counter(runner.messages) == messages(MODELS["gqa"], shape, engine)
        return found

    assert served(2, two_processes) == served(1, Ranks())


def test_a_scenario_in_stages_overlaps_its_chunks(two_processes, monkeypatch):
    """A prompt of 64 tokens in chunks of 16: each begins before the one in front of it is back."""
    overrides = [
        *("traffic.num_requests=1", "traffic.input_tokens={distribution: fixed, value: 64}"),
        *("traffic.output_tokens={distribution: fixed, value: 2}", "engine.max_num_batched_tokens=16"),
        *("engine.num_gpu_blocks_override=100", "engine.max_model_len=128", "engine.pipeline_parallel_size=2"),
    ]
    scenario = load_scenario("tiny-llama-cpu", overrides).model_copy(update={"model": MODELS["gqa"]})
    monkeypatch.setattr(run, "open_ranks", lambda *_: nullcontext(two_processes))
    steps = execute_scenario(scenario).steps
    assert steps.num_tokens.tolist() == [16, 16, 16, 16, 1]
    assert (steps.start_s[1:4] < steps.end_s[:3]).all()
    assert steps.start_s[4] == steps.end_s[3]


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (["engine.tensor_parallel_size=2"], "stages of several ranks are not executed"),
        (["model_changes.early_exit={expected_share: 0.5}"], "leave early"),
    ],
)
def test_what_is_not_executed_in_stages_is_refused(more, found):
    with pytest.raises(PerfmodelError, match=found):
        execute_scenario(load_scenario("tiny-llama-cpu", ["engine.pipeline_parallel_size=2", *more]))
    with pytest.raises(PerfmodelError, match="leave out --live"):
        execute_scenario(load_scenario("tiny-llama-cpu", ["engine.pipeline_parallel_size=2"]), live=True)
