"""Sampling draws what the distribution says, of what top-k and top-p leave."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402
from scipy.stats import chi2  # noqa: E402

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop, Speculation  # noqa: E402
from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.graphs import DecodeGraphs, no_capture  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.sampling import DRAW_BITS  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402
from perfmodel_executors.sampling import (  # noqa: E402
    Draws,
    SamplingSettings,
    settings_of,
)
from perfmodel_executors.speculation.build import build_speculator  # noqa: E402
from perfmodel_executors.tokens import TokenStore  # noqa: E402

SAMPLE = load_kernels().sample_top_k_top_p
LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.5, -3.0])


def draw(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, draws=4000, logits=LOGITS, numbers=None):
    """Frequencies over evenly spaced numbers: no chance is left in them but rounding to 1 / draws."""
    if numbers is None:
        numbers = ((torch.arange(draws) + 0.5) / draws * (1 << DRAW_BITS)).long()
    tokens = SAMPLE(
        logits.expand(draws, -1),
        numbers,
        torch.full((draws,), temperature),
        torch.full((draws,), top_k, dtype=torch.int32),
        torch.full((draws,), top_p),
        torch.full((draws,), min_p),
    )
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


def kept(mask, temperature=1.0):
    weights = torch.where(torch.tensor(mask), (LOGITS / temperature).exp(), 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature):
    torch.testing.assert_close(draw(temperature), torch.softmax(LOGITS / temperature, 0), rtol=0, atol=1 / 1000)


def test_top_k_leaves_k_tokens_in_their_proportion():
    expected = kept([False, True, False, True, True, False])
    torch.testing.assert_close(draw(top_k=3), expected, rtol=0, atol=1 / 1000)


def test_top_p_leaves_the_fewest_tokens_that_reach_it():
    """Probabilities 0.56, 0.20, 0.12, 0.08, ...: 0.7 takes two, 0.8 three; of what top-3 leaves (0.63, 0.23, 0.14)
    0.8 takes two."""
    two, three = [False, True, False, True, False, False], [False, True, False, True, True, False]
    torch.testing.assert_close(draw(top_p=0.7), kept(two), rtol=0, atol=1 / 1000)
    torch.testing.assert_close(draw(top_p=0.8), kept(three), rtol=0, atol=1 / 1000)
    torch.testing.assert_close(draw(top_k=3, top_p=0.8), kept(two), rtol=0, atol=1 / 1000)


def test_temperature_zero_is_greedy_with_the_first_of_equal_tokens():
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert draw(0.0, top_p=0.9, logits=logits).tolist() == [0, 1, 0, 0]


def test_what_is_nearly_impossible_is_not_drawn():
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert draw(logits=logits).tolist() == [0, 1, 0]


def test_min_p_leaves_what_is_likely_enough_beside_the_likeliest():
    """exp(l - 2): 0.15, 1, 0.05, 0.37, 0.22, 0.007."""
    torch.testing.assert_close(draw(min_p=0.2), kept([False, True, False, True, True, False]), rtol=0, atol=1 / 1000)
    torch.testing.assert_close(
        draw(min_p=0.2, top_k=2), kept([False, True, False, True, False, False]), rtol=0, atol=1 / 1000
    )


@pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_p": 0.9, "top_k": 40, "min_p": 0.02}])
def test_drawn_tokens_are_distributed_as_the_closed_form_says(settings):
    """Pearson's chi-square over 30,000 tokens of one request, at the 0.1 % level; the closed form counts by ranks."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 1.5
    draws = 30_000
    numbers = torch.tensor(Draws(seed=11).of(request_id=5, position=0, count=draws))
    counts = draw(0.8, **settings, draws=draws, logits=logits, numbers=numbers) * draws
    p = torch.softmax(logits.double() / 0.8, 0)
    order = p.argsort(descending=True)
    chosen = [i for i in order.tolist() if p[i] >= settings.get("min_p", 0) * p.max()][: settings.get("top_k", 64)]
    ends = p[chosen].cumsum(0) / p[chosen].sum()
    chosen = chosen[: int((ends < settings.get("top_p", 1.0)).sum()) + 1]
    expected = p[chosen] / p[chosen].sum() * draws
    assert counts[chosen].sum() == draws
    statistic = float(((counts[chosen] - expected) ** 2 / expected).sum())
    assert statistic < chi2.ppf(0.999, len(chosen) - 1)


BLOCK = 4
SETTINGS = SamplingSettings(temperature=0.9, top_k=30, top_p=0.95)


def drawing(model="gqa", **changes):
    return Decoder(MODELS[model], torch.float32, seed=1, sampling=SETTINGS, **changes)


def alone(decoder, request, seed=7):
    """The request's tokens, drawn by itself in one block-contiguous cache."""
    tokens = list(TokenStore(decoder.model.vocab_size, BLOCK).of(request))
    table = list(range(-(-(len(tokens) + request.max_output_tokens) // BLOCK)))
    cache, done, outputs, draws = decoder.new_cache(BLOCK, len(table)), 0, [], Draws(seed)
    with torch.inference_mode():
        while len(outputs) < request.max_output_tokens:
            segment = TokenSegment(tokens[done:], done, table, draws=draws.of(request.request_id, len(tokens)))
            outputs += decoder.step(build_batch([segment], BLOCK), cache)
            done = len(tokens)
            tokens.append(outputs[-1])
    return outputs


def requests():
    return [Request(i, i * 20, 3 + 2 * i, 9 + i) for i in range(6)]


def served(decoder, seed=7, runner=None, speculator=None, **config):
    """Output tokens of the requests, in small chunks and with few KV blocks."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=12, block_size=BLOCK, record_positions=True, **config
    )
    loop = ServeLoop(Scheduler(config, KVBlockManager(24, BLOCK)))
    ticks, runner = iter(range(10**9)), runner or StepRunner(decoder, decoder.new_cache(BLOCK))
    backend = ExecutedBackend(
        *(runner, 0, lambda: next(ticks)), warms_up=False, draws=Draws(seed), speculator=speculator
    )
    finished = []
    serve(loop, backend, requests(), finished.append)
    return {request.request_id: backend.tokens.outputs(request) for request in finished}


def test_a_request_draws_the_same_tokens_in_any_batch_and_others_with_another_seed():
    decoder = drawing()
    outputs = served(decoder)
    assert outputs == {r.request_id: alone(decoder, r) for r in requests()}
    assert outputs != served(decoder, seed=8)
    greedy = Decoder(MODELS["gqa"], torch.float32, seed=1)
    assert outputs != served(greedy)
    assert len({tuple(tokens[:6]) for tokens in outputs.values()}) == len(outputs)


def test_steps_of_graphs_draw_what_eager_ones_do():
    decoder = drawing()
    cache = decoder.new_cache(BLOCK, 25)
    runner = StepRunner(decoder, cache, DecodeGraphs(decoder, cache, 24, 4, 64, no_capture))
    assert served(decoder, runner=runner) == served(decoder)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "acceptance": {"rate": 0.5}},
        {"method": "self_skip", "draft_layers": 1, "num_speculative_tokens": 2, "acceptance": {"rate": 0.5}},
        {"method": "self_quantized", "quantization": "w8a16", "tree": [2, 2], "acceptance": {"rate": 0.5}},
    ],
)
def test_drafts_change_no_token_that_is_drawn(config):
    """What is verified is drawn with the random number of its position."""
    engine = EngineSpec(dtype="float32", block_size=BLOCK, speculative_config=config)
    decoder = drawing()
    runner = StepRunner(decoder, decoder.new_cache(BLOCK, 24))
    speculator = build_speculator(runner, engine)
    speculation = Speculation(engine.speculative_config.nodes_by_depth)
    outputs = served(decoder, runner=runner, speculator=speculator, speculation=speculation)
    assert outputs == {r.request_id: alone(decoder, r) for r in requests()}


def scenario(*settings):
    lengths = [f"traffic.{side}_tokens={{distribution: fixed, value: 8}}" for side in ("input", "output")]
    small = ["traffic.num_requests=3", *lengths]
    return load_scenario("tiny-llama-cpu", [*small, *settings])


def test_what_a_scenario_asks_for_is_executed_and_noted():
    result = execute_scenario(scenario("sampling.method=top_p", "sampling.top_p=0.8", "sampling.seed=5"))
    assert any("top_p 0.8, seed 5" in note for note in result.notes)
    assert not any("drawn" in note for note in execute_scenario(scenario("sampling.method=greedy")).notes)


def test_settings_are_those_of_the_scenario_with_the_defaults_of_its_method():
    model = MODELS["gqa"]

    def of(*settings):
        return settings_of(scenario(*settings).sampling, model)

    assert of("sampling.method=greedy") is None
    assert of() is None  # the model's own method
    assert of("sampling.method=random") == SamplingSettings()
    assert of("sampling.method=top_k") == SamplingSettings(top_k=50)
    assert of("sampling.method=top_p", "sampling.temperature=0.6") == SamplingSettings(0.6, top_p=0.9)
    assert of("sampling.method=top_k", "sampling.top_k=7", "sampling.top_p=0.5") == SamplingSettings(1.0, 7, 0.5)
    for wrong in (("sampling.method=greedy", "sampling.top_p=0.5"), ("sampling.top_k=5",)):
        with pytest.raises(PerfmodelError, match=r"got top_\w with method="):
            of(*wrong)


@pytest.mark.parametrize("sampling", [None, SETTINGS])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary_and_are_counted(sampling):
    decoder = Decoder(MODELS["gqa"], torch.float32, seed=1, sampling=sampling)
    logits = torch.randn(3, 101)
    logits[0, 40:] = torch.nan
    logits[2] = torch.nan
    draws = None if sampling is None else torch.tensor([1 << 30] * 3)
    tokens = decoder.chooser.choose(logits, draws)
    assert 0 <= int(tokens[0]) < 40
    assert 0 <= int(tokens[2]) < 101
    assert decoder.chooser.num_nan == 61 + 101


def test_a_run_says_that_its_model_computes_no_numbers(monkeypatch):
    plain = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", lambda *args: plain(*args) * float("nan"))
    result = execute_scenario(scenario("sampling.method=greedy"))
    assert any("logits were no numbers" in note for note in result.notes)
