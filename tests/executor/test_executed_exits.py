"""Tokens that leave early against a dense model in which they keep their state from there on. fp32."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402
from test_backend import alone, executed_cases, served  # noqa: E402
from test_decoder import BLOCK, dense_attention, dense_block, rms  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.evidence.fit.whole_steps import features  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.models.changes import with_window  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.models.spec import ExitSpec, QuantizationSpec  # noqa: E402
from perfmodel.ops.graphs.step import build_graph  # noqa: E402
from perfmodel.ops.work import BatchShape  # noqa: E402
from perfmodel.specs import load_hardware, load_scenario  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from workloads import Case  # noqa: E402

NUM_LAYERS = 5
DENSE = DenseFFN(intermediate_size=48)
BIASED = attention(qk_norm=True, qkv_bias=True, output_gate=True, v_head_dim=6)
MODEL = tiny(*[(attention(), DENSE), (BIASED, DENSE)] * 2, (attention(rope=None, window=9), DENSE))
DECODER = Decoder(MODEL, torch.float32, seed=1)
ROLLING = with_window(tiny(*[(attention(), DENSE)] * NUM_LAYERS), ModelChanges(window=17, sinks=3))


def leaving(model, *reach, asks=False):
    return replace(model, exits=ExitSpec(reach, asks))


def dense_logits(decoder, tokens, depths):
    """All positions' logits without a cache, of tokens that pass so many layers each."""
    x, depths = decoder.weights.embedding[torch.tensor(tokens)], torch.tensor(depths)[:, None]
    for index, (layer, weights) in enumerate(zip(decoder.model.iter_layers(), decoder.weights.layers, strict=True)):
        after = x + dense_attention(layer.mixer, weights.mixer, rms(x, weights.mixer_norm))
        after = after + dense_block(layer.ffn, weights.ffn, rms(after, weights.ffn_norm))
        x = torch.where(depths > index, after, x)
    return rms(x, decoder.weights.final_norm) @ decoder.weights.lm_head.T


depth_lists = st.lists(st.integers(1, NUM_LAYERS), min_size=1, max_size=8)


@given(st.lists(depth_lists, min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_logits_are_those_of_a_dense_model_whose_tokens_keep_their_state(all_depths, asks, seed):
    """Sequences that decode together, each token leaving where it likes, beside a prompt that nobody may leave."""
    decoder = Decoder(leaving(MODEL, *(1.0, 0.5, 0.5, 0.5, 0.5), asks=asks), torch.float32, weights=DECODER.weights)
    draw = torch.Generator().manual_seed(seed)
    prompt, cache = 11, decoder.new_cache(BLOCK, 60)
    tables = [list(range(5 * i, 5 * i + 5)) for i in range(len(all_depths))]
    texts = [torch.randint(101, (prompt + len(depths),), generator=draw).tolist() for depths in all_depths]
    chunks = [TokenSegment(text[:prompt], 0, table) for text, table in zip(texts, tables, strict=True)]
    with torch.inference_mode():
        decoder.forward(build_batch(chunks, BLOCK), cache)
        for step in range(max(map(len, all_depths))):
            here = [i for i, depths in enumerate(all_depths) if step < len(depths)]
            at = prompt + step
            segments = [TokenSegment([texts[i][at]], at, tables[i], num_layers=all_depths[i][step]) for i in here]
            beside = TokenSegment(texts[0][:7], 0, [58, 59])
            logits = decoder.forward(build_batch([*segments, beside], BLOCK), cache)
            for row, i in enumerate(here):
                depths = [NUM_LAYERS] * prompt + all_depths[i][: step + 1]
                expected = dense_logits(DECODER, texts[i][: at + 1], depths)[-1]
                torch.testing.assert_close(logits[row], expected, rtol=1e-3, atol=1e-4)
            plain = dense_logits(DECODER, texts[0][:7], [NUM_LAYERS] * 7)[-1]
            torch.testing.assert_close(logits[-1], plain, rtol=1e-3, atol=1e-4)


@pytest.mark.release
@given(executed_cases(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_where_nobody_leaves_the_tokens_are_the_plain_models(case: Case, asks: bool) -> None:
    decoder = Decoder(leaving(MODEL, *[1.0] * NUM_LAYERS, asks=asks), torch.float32, weights=DECODER.weights)
    outputs = served(decoder, case.loop(), case.requests())
    for request in case.requests():
        assert outputs[request.request_id] == alone(DECODER, request)


def test_who_leaves_a_rolling_cache_is_still_found_there():
    """Alone and beside others that leave elsewhere: the same tokens, over a ring that has gone round."""
    decoder = Decoder(leaving(ROLLING, *[1.0] * NUM_LAYERS), torch.float32, seed=1)

    def decode(companions):
        cache, tables = decoder.new_cache(BLOCK, 30), [list(range(5 * i, 5 * i + 5)) for i in range(3)]
        text = list(range(50, 60))
        with torch.inference_mode():
            prompts = [TokenSegment(text, 0, table) for table in tables]
            for each in prompts:
                decoder.forward(build_batch([each], BLOCK, ring=decoder.ring), cache)
            for step in range(30):
                position = len(text)
                segments = [TokenSegment([text[-1]], position, tables[0], num_layers=1 + step % NUM_LAYERS)]
                segments += [
                    TokenSegment([step], position, table, num_layers=depth)
                    for table, depth in zip(tables[1:], companions, strict=False)
                ]
                text.append(decoder.step(build_batch(segments, BLOCK, ring=decoder.ring), cache)[0])
        return text

    assert decode(()) == decode((2, 4))


def test_layers_that_run_are_as_many_as_the_cost_model_counts():
    """Batches of four that leave by the rates: the layers run, and the rows in them, on average over many steps."""
    reach, batch, num_steps = (1.0, 0.8, 0.5, 0.3, 0.1), 4, 400
    graph = build_graph(leaving(MODEL, *reach))
    counts = {"runs": 0, "rows": 0}

    class Counting(Decoder):
        def through(self, batch, cache, first=0, stop=None, x_TC=None):
            counts["runs"] += stop - first
            counts["rows"] += (stop - first) * len(batch.tokens_T)
            return super().through(batch, cache, first, stop, x_TC)

    decoder = Counting(leaving(MODEL, *reach), torch.float32, weights=DECODER.weights)
    cache, draw = decoder.new_cache(BLOCK, batch), torch.Generator().manual_seed(3)
    with torch.inference_mode():
        for draws in torch.rand(num_steps, batch, generator=draw).tolist():
            depths = [sum(u < share for share in reach) for u in draws]
            decoder.forward(
                build_batch([TokenSegment([i], 0, [i], num_layers=depth) for i, depth in enumerate(depths)], BLOCK),
                cache,
            )
    shape = BatchShape(batch, batch, num_decodes=batch, decode_context=batch)
    expected = sum(node.expected_runs(shape) for node in graph.nodes if node.name.split("@")[0] == "down_proj")
    assert counts["runs"] / num_steps == pytest.approx(expected, rel=0.05)
    assert counts["rows"] / num_steps == pytest.approx(batch * sum(reach), rel=0.05)


def test_a_fit_sees_the_layers_that_run_and_not_all_of_them():
    """Each layer that a token leaves out saves the same work; where it passes all, the work is the plain model's."""
    hardware, shape = load_hardware("cpu"), BatchShape(1, 1, num_decodes=1, decode_context=32)
    plain = tiny(*[(attention(), DENSE)] * NUM_LAYERS)

    def gemm(model):
        return features(build_graph(model), hardware, shape)["gemm", "compute"]

    passed = [gemm(leaving(plain, *(float(i < n) for i in range(NUM_LAYERS)))) for n in range(1, NUM_LAYERS + 1)]
    saved = [more - less for less, more in pairwise(passed)]
    assert saved == pytest.approx([saved[0]] * len(saved))
    assert passed[-1] == pytest.approx(gemm(plain))
    one = tiny((attention(), DENSE))
    assert gemm(one) < passed[0] < gemm(one) + 4 * saved[0]  # others project keys and values


def test_a_scenario_says_how_much_of_the_model_its_tokens_passed():
    overrides = [
        "model_changes.early_exit={expected_share: 0.5}",
        "traffic.num_requests=6",
        "traffic.input_tokens={distribution: fixed, value: 8}",
        "traffic.output_tokens={distribution: fixed, value: 20}",
        "engine.num_gpu_blocks_override=100",
        "engine.max_model_len=64",
    ]
    result = execute_scenario(load_scenario("tiny-llama-cpu", overrides))
    (said,) = [note for note in result.notes if "passed" in note]
    assert 40 < int(said.split("%")[0].split()[-1]) < 60


def test_quantised_projections_are_not_cut_into_keys_and_values():
    model = leaving(replace(MODELS["gqa"], quantization=QuantizationSpec("int8", "int8", "bf16")), 1.0, 0.5)
    with pytest.raises(PerfmodelError, match=r"early exit .* from layers of quantised"):
        Decoder(model)
