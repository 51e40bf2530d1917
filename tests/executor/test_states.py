"""States of recurrent layers: one for each sequence, whoever had its blocks before, and whatever runs twice."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN, GatedDeltaNet, LatentAttention, Mamba  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.support import check_served  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402

BLOCK = 4
MAMBA = Mamba(num_heads=4, head_dim=8, state_size=8, num_groups=2, conv_kernel=4, chunk_size=8)
MODELS = {
    "mamba": tiny((MAMBA, DenseFFN(48)), (attention(), DenseFFN(48))),
    "delta-net": tiny((GatedDeltaNet(2, 4, 8, 8, 4), DenseFFN(48)), (attention(), DenseFFN(48))),
}


@pytest.fixture(params=MODELS)
def decoder(request):
    return Decoder(MODELS[request.param], torch.float32, seed=5)


def text(seed, length=23):
    return torch.randint(101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(decoder, cache, *segments):
    with torch.inference_mode():
        return decoder.forward(build_batch(segments, BLOCK), cache)


def alone(decoder, tokens):
    """Logits after the last token of a sequence that is computed at once, in a cache of its own."""
    return run(decoder, decoder.new_cache(BLOCK, 8), TokenSegment(tokens, 0, range(8)))


def test_a_new_sequence_finds_nothing_of_the_one_that_had_its_blocks(decoder):
    cache, first, second = decoder.new_cache(BLOCK, 8), text(1), text(2)
    run(decoder, cache, TokenSegment(first, 0, range(8)))
    torch.testing.assert_close(run(decoder, cache, TokenSegment(second, 0, range(8))), alone(decoder, second))


def test_a_preempted_sequence_starts_anew_in_other_blocks(decoder):
    cache, tokens = decoder.new_cache(BLOCK, 16), text(3)
    run(decoder, cache, TokenSegment(tokens[:9], 0, range(8)))
    logits = run(decoder, cache, TokenSegment(tokens, 0, range(8, 16)))
    torch.testing.assert_close(logits, alone(decoder, tokens))


def test_many_sequences_one_after_the_other_need_no_more_rows_than_blocks(decoder):
    """Blocks go round: what began with one is over once another sequence has it inside."""
    cache = decoder.new_cache(BLOCK, 16)
    for start in range(0, 180, 3):
        run(decoder, cache, TokenSegment(text(start, 9), 0, [(start + i) % 16 for i in range(3)]))
    states = next(iter(cache.states.layers.values()))
    assert len(states.state) <= 16


def test_a_short_sequence_leaves_others_of_its_step_alone(decoder):
    """Tables of a step are padded to the longest with block 0, with which another sequence begins."""
    cache, longer, shorter = decoder.new_cache(BLOCK, 16), text(6), text(7, 6)
    run(decoder, cache, TokenSegment(longer[:20], 0, range(8)))
    both = run(decoder, cache, TokenSegment(longer[20:], 20, range(8)), TokenSegment(shorter, 0, [9, 10]))
    torch.testing.assert_close(both[0], alone(decoder, longer)[0])
    torch.testing.assert_close(both[1], alone(decoder, shorter)[0])
    torch.testing.assert_close(run(decoder, cache, TokenSegment([5], 23, range(8))), alone(decoder, [*longer, 5]))


def test_a_warm_up_leaves_states_as_they_were(decoder):
    cache, tokens = decoder.new_cache(BLOCK, 8), text(4)
    runner = StepRunner(decoder, cache)
    runner.run([TokenSegment(tokens[:-1], 0, range(8), is_sampled=False)])
    step = [TokenSegment(tokens[-1:], len(tokens) - 1, range(8))]
    runner.run(step, is_warm_up=True)
    assert runner.run(step) == alone(decoder, tokens).argmax(-1).tolist()
    torch.testing.assert_close(
        run(decoder, cache, TokenSegment([7], len(tokens), range(8))), alone(decoder, [*tokens, 7])
    )


def test_states_are_kept_in_the_format_of_the_engine():
    """bf16 rounds each step's state by up to 2^-9 of it: near the logits of fp32, and not at them."""
    half = tiny((replace(MAMBA, state_format="bf16"), DenseFFN(48)), (attention(), DenseFFN(48)))
    tokens, logits = text(8), []
    for model in (MODELS["mamba"], half):
        decoder = Decoder(model, torch.float32, seed=5)
        cache = decoder.new_cache(BLOCK, 8)
        for position, token in enumerate(tokens):
            last = run(decoder, cache, TokenSegment([token], position, range(8)))
        logits.append(last)
    difference = float((logits[0] - logits[1]).abs().max())
    assert 0 < difference < 0.05


def test_what_states_and_latents_cannot_do_is_refused_in_a_sentence():
    draft = EngineSpec(speculative_config={"method": "ngram", "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}})
    with pytest.raises(PerfmodelError, match="taken out of recurrent states again"):
        check_served(MODELS["mamba"], draft)
    latent = tiny((LatentAttention(4, None, 16, 8, 8, 8), DenseFFN(8)))
    with pytest.raises(PerfmodelError, match=r"kv_cache=off\) are executed for softmax attention only"):
        check_served(latent, EngineSpec(kv_cache="off"))
    with pytest.raises(PerfmodelError, match="capped scores or sinks in the softmax are not executed with standard"):
        Decoder(tiny((attention(logit_cap=5.0), DenseFFN(8))), attention="standard")


def test_a_hybrid_is_served_whole():
    """Mamba-2 in the place of half of the attention, under continuous batching, without shared prefixes."""
    changes = "model_changes.ssm_layers={attention_every: 2, head_dim: 16, state_size: 16, num_groups: 1}"
    few = ["engine.dtype=float32", "traffic.num_requests=5", "engine.enable_prefix_caching=true", changes]
    result = execute_scenario(load_scenario("tiny-llama-cpu", few))
    assert result.summary["completed"] == 5
    assert not result.scenario.engine.enable_prefix_caching
