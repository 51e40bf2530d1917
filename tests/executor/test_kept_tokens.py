"""Keys and values that are kept by age in several precisions, or by their scores: against their definitions."""

import math

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors.kernels.kv_pages import Packing, packed, unpacked  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402

BLOCK = 4
MODEL = tiny((attention(), DenseFFN(48)), (attention(), DenseFFN(48)))
FLOAT32 = EngineSpec(dtype="float32", block_size=BLOCK)
TIERS = ({"tokens": 6}, {"tokens": 5, "dtype": "int8"}, {"dtype": "int4"})


def decoder_of(**engine):
    return load_decoder(MODEL, EngineSpec(dtype="float32", block_size=BLOCK, **engine), seed=3)


def text(seed, length):
    return torch.randint(101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(decoder, cache, *segments):
    with torch.inference_mode():
        return decoder.forward(build_batch(segments, BLOCK, ring=decoder.ring), cache)


def served(decoder, tokens, cuts, blocks=range(12)):
    """Logits after the last token, in steps of so many tokens each."""
    cache, done = decoder.new_cache(BLOCK, 24), 0
    for count in cuts:
        logits = run(decoder, cache, TokenSegment(tokens[done : done + count], done, list(blocks)))
        done += count
    assert done == len(tokens)
    return logits


@pytest.mark.parametrize(
    "engine",
    [
        {"kv_tiers": TIERS, "kv_cache_group_size": 8},
        {"kv_cache_dtype": "int2", "kv_cache_group_size": 8, "kv_cache_residual_tokens": 16},
        {"kv_eviction": {"heavy_tokens": 12, "recent_tokens": 12}},
    ],
    ids=["tiers", "residual window", "eviction"],
)
def test_with_room_for_all_tokens_nothing_changes(engine):
    """As long as a sequence fits the newest tier, or what is kept, steps are those of a plain cache."""
    count = 6 if "kv_tiers" in engine else 16
    tokens = text(1, count)
    expected = served(decoder_of(), tokens, [count])
    cuts = [count - 4, 1, 2, 1]
    torch.testing.assert_close(served(decoder_of(**engine), tokens, cuts), expected, rtol=1e-4, atol=1e-4)


def by_definition(decoder, tokens, cuts, look):
    """A forward pass over whole sequences, in which `look` says what each layer's queries see of which keys.

    look(layer, position of the step's first token, keys [L, K, H], values, queries [T, N, H]) -> outputs [T, N, H]
    """
    kernels, model, weights = decoder.kernels, decoder.model, decoder.weights
    done, logits = 0, None
    held = [(torch.empty(0, 2, 8), torch.empty(0, 2, 8)) for _ in range(model.num_layers)]
    table = decoder._tables[model.layers[0][0].mixer.rope, 8]
    for count in cuts:
        positions = torch.arange(done, done + count)
        x = weights.embedding[torch.tensor(tokens[done : done + count])]
        for index, own in enumerate(weights.layers):
            h = kernels.rms_norm(x, own.mixer_norm, model.norm_eps)
            q, k, v = torch.split(h @ own.mixer.qkv.T, [32, 16, 16], dim=-1)
            q, k = (kernels.rope(part.view(count, -1, 8), table[positions]) for part in (q, k))
            keys, values = (torch.cat(pair) for pair in zip(held[index], (k, v.view(count, 2, 8)), strict=True))
            held[index] = keys, values
            x = x + look(index, done, keys, values, q).reshape(count, -1) @ own.mixer.out.T
            h = kernels.rms_norm(x, own.ffn_norm, model.norm_eps)
            x = x + kernels.activate(h @ own.ffn.up.T, "silu", True) @ own.ffn.down.T
        done += count
        logits = kernels.rms_norm(x[-1:], weights.final_norm, model.norm_eps) @ weights.lm_head.T
    return logits


def softmax(q, k, v, hidden):
    """One KV head's queries [T, H]; shares and outputs."""
    scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
    shares = torch.softmax(scores, dim=-1)
    return shares, shares @ v


def rounded(x, form):
    """Numbers [L, K, H] as a tier stores them."""
    if not len(x):
        return x
    packing = Packing({"int8": 8, "int4": 4}[form], 8)
    return unpacked(*packed(x, packing), packing, torch.float32)


@pytest.mark.parametrize("cuts", [[33], [20] + [1] * 13, [7, 9, 1, 1, 8, 1, 6]], ids=["at once", "decodes", "pieces"])
def test_each_tier_holds_its_ages_in_its_precision(cuts):
    """A step finds the 6 newest as they were, the 5 before them in INT8, older ones rounded to INT8, then to INT4."""
    decoder, tokens = decoder_of(kv_tiers=TIERS, kv_cache_group_size=8), text(2, 33)

    def look(_, before, keys, values, q):
        seen = []
        for x in (keys, values):
            middle, first = max(0, before - 6), max(0, before - 11)
            # What was never in the middle tier goes from full precision to the last one.
            old = torch.where(aged(before)[:first, None, None], rounded(x, "int8")[:first], x[:first])
            parts = (rounded(old, "int4") if first else old, rounded(x[first:middle], "int8"), x[middle:])
            seen.append(torch.cat(parts) if middle else x)
        return attended(q, *seen, before)

    def aged(before):
        """Which tokens were in the middle tier behind some step up to now."""
        was, done = torch.zeros(64, dtype=torch.bool), 0
        for count in cuts:
            done += count
            if done <= before:
                was[max(0, done - 11) : max(0, done - 6)] = True
        return was

    expected = by_definition(decoder, tokens, cuts, look)
    torch.testing.assert_close(served(decoder, tokens, cuts), expected, rtol=1e-3, atol=1e-3)
    if len(cuts) > 1:
        assert (expected - served(decoder_of(), tokens, cuts)).abs().max() > 0.01


def attended(q, keys, values, before):
    count, total = len(q), len(keys)
    hidden = torch.arange(total) > before + torch.arange(count)[:, None]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        _, out[:, head] = softmax(q[:, head], keys[:, head // 2], values[:, head // 2], hidden)
    return out


@pytest.mark.parametrize("cuts", [[33], [20] + [1] * 13, [7, 9, 1, 1, 8, 1, 6]], ids=["at once", "decodes", "pieces"])
def test_eviction_keeps_the_heaviest_and_the_newest_of_each_head(cuts):
    """Zhang et al. 2023, algorithm 1: token by token, in lists."""
    heavy, recent, room = 5, 4, 9
    decoder = decoder_of(kv_eviction={"heavy_tokens": heavy, "recent_tokens": recent})
    tokens = text(4, 33)
    kept: dict[tuple[int, int], dict[int, float]] = {}  # (layer, head) -> position -> score

    def look(layer, before, keys, values, q):
        out = torch.empty_like(q)
        for head in range(2):
            scores = kept.setdefault((layer, head), {})
            seen = [*sorted(scores), *range(before, len(keys))]
            own = torch.tensor(seen)
            hidden = own > before + torch.arange(len(q))[:, None]
            for query in (2 * head, 2 * head + 1):
                shares, out[:, query] = softmax(q[:, query], keys[own, head], values[own, head], hidden)
                for place, share in zip(seen, shares.sum(0).tolist(), strict=True):
                    scores[place] = scores.get(place, 0.0) + share
            newest = [place for place in seen if place >= len(keys) - recent]
            others = sorted((place for place in seen if place not in newest), key=lambda p: -scores[p])
            left = {*newest, *others[: room - len(newest)]}
            kept[layer, head] = {place: scores[place] for place in seen if place in left}
        return out

    expected = by_definition(decoder, tokens, cuts, look)
    torch.testing.assert_close(served(decoder, tokens, cuts, range(3)), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "engine",
    [{"kv_tiers": TIERS, "kv_cache_group_size": 8}, {"kv_eviction": {"heavy_tokens": 5, "recent_tokens": 4}}],
    ids=["tiers", "eviction"],
)
def test_sequences_of_a_step_keep_to_themselves(engine):
    decoder, one, other = decoder_of(**engine), text(5, 21), text(6, 17)
    cache = decoder.new_cache(BLOCK, 24)
    run(decoder, cache, TokenSegment(one[:20], 0, list(range(8))))
    run(decoder, cache, TokenSegment(other[:11], 0, list(range(8, 16))))
    segments = TokenSegment(one[20:], 20, list(range(8))), TokenSegment(other[11:], 11, list(range(8, 16)))
    mixed = run(decoder, cache, *segments)
    torch.testing.assert_close(mixed[0], served(decoder, one, [20, 1])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed[1], served(decoder, other, [11, 6])[0], rtol=1e-4, atol=1e-4)


def test_a_scenario_is_served_and_keeps_no_prefix():
    engine = ["hardware=cpu", "model=tiny-llama", "traffic.num_requests=2", "engine.max_model_len=512"]
    engine += [f"traffic.{of}_tokens={{distribution: fixed, value: {n}}}" for of, n in (("input", 80), ("output", 4))]
    kept = "engine.kv_eviction={heavy_tokens: 32, recent_tokens: 32}", "engine.kv_tiers=[{tokens: 32}, {dtype: int8}]"
    for more in kept:
        result = execute_scenario(load_scenario("tiny-llama-cpu", [*engine, more]))
        assert len(result.requests) == 2
        assert not result.scenario.engine.enable_prefix_caching


def test_what_is_kept_by_age_or_score_cannot_be_taken_back():
    draft = "engine.speculative_config={method: ngram, num_speculative_tokens: 2}"
    scenario = load_scenario("tiny-llama-cpu", ["engine.kv_tiers=[{tokens: 32}, {dtype: int8}]", draft])
    with pytest.raises(PerfmodelError, match="or of keys kept by age or score"):
        execute_scenario(scenario)
    with pytest.raises(PerfmodelError, match="several precisions with fp8 is not executed"):
        decoder_of(kv_tiers=({"tokens": 8}, {"dtype": "fp8"}))
