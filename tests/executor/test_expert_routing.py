"""Experts of a fixed capacity, and routers that prefer some experts as a scenario says."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import MoEFFN  # noqa: E402
from perfmodel.ops.routing import capacity_rows, popularity_of  # noqa: E402
from perfmodel.specs import load_model  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel.specs.traffic import ExpertRouting  # noqa: E402
from perfmodel_executors.kernels import load_kernels  # noqa: E402
from perfmodel_executors.kernels.moe import ExpertLayer  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import (  # noqa: E402
    Decoder,
    load_decoder,
    route_tokens,
)
from perfmodel_executors.models.random_weights import popular_biases  # noqa: E402

FLOAT32 = EngineSpec(dtype="float32")
SKEWED = ExpertRouting(distribution="power_law", alpha=1.2)


def experts(num_tokens=24, num_experts=4, top_k=2, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, logits = random(num_tokens, width), random(num_tokens, num_experts)
    weights, chosen = load_kernels().route(logits, top_k)
    layer = ExpertLayer(random(num_experts, 2 * width, width), random(num_experts, width, width), "silu", True)
    return x, weights, chosen, layer


def test_with_room_for_all_tokens_a_capacity_changes_nothing():
    args = experts()
    kernels = load_kernels()
    torch.testing.assert_close(kernels.capacity_experts(*args, 24), kernels.grouped_experts(*args))


def test_what_exceeds_the_capacity_adds_nothing_and_first_choices_go_first():
    """By its definition: token by token, first choices of all before the second ones."""
    x, weights, chosen, layer = experts()
    taken, expected, kernels = [0] * 4, torch.zeros_like(x), load_kernels()
    dropped = 0
    for choice in range(2):
        for token in range(24):
            expert = int(chosen[token, choice])
            taken[expert] += 1
            if taken[expert] > 7:
                dropped += 1
                continue
            one = torch.ones(1, 1), torch.tensor([[expert]])
            part = kernels.grouped_experts(x[token : token + 1], *one, layer)[0]
            expected[token] += weights[token, choice] * part
    assert dropped
    torch.testing.assert_close(kernels.capacity_experts(x, weights, chosen, layer, 7), expected, rtol=1e-4, atol=1e-4)


def test_every_expert_multiplies_its_capacity_whoever_was_chosen(monkeypatch):
    """The rows of the products are those that the simulator counts, for any number of tokens."""
    from perfmodel_executors.kernels import moe as reference

    seen, ffn = [], MoEFFN(4, 2, 16)
    apply_linear = reference.apply_linear

    def counted(kernels, x, weight, bias=None):
        seen.append(len(x))
        return apply_linear(kernels, x, weight, bias)

    monkeypatch.setattr(reference, "apply_linear", counted)
    for num_tokens in (1, 3, 24):
        seen.clear()
        rows = capacity_rows(ffn, num_tokens, 1.25)
        load_kernels().capacity_experts(*experts(num_tokens), rows)
        assert seen == [rows] * 8  # up and down of four experts


def test_a_decoder_serves_with_the_capacity_of_its_scenario():
    model = MODELS["moe"]
    tokens = [5, 9, 3, 7, 11, 2, 8, 1, 6]

    def logits(**routing):
        decoder = load_decoder(model, FLOAT32, routing=ExpertRouting(**routing))
        cache = decoder.new_cache(16)
        cache.reserve(1)
        with torch.inference_mode():
            return decoder.forward(build_batch([TokenSegment(tokens, 0, [0])], 16), cache)

    free = logits()
    torch.testing.assert_close(logits(capacity_factor=100.0), free, rtol=1e-4, atol=1e-4)
    assert (logits(capacity_factor=0.5) - free).abs().max() > 1e-2


@pytest.mark.parametrize(("top_k", "num_experts"), [(2, 8), (1, 4), (4, 32)])
def test_random_logits_with_the_biases_choose_as_often_as_is_drawn(top_k, num_experts):
    ffn = MoEFFN(num_experts, top_k, 16)
    chances = popularity_of(SKEWED)(num_experts, top_k)[0]
    bias = popular_biases(chances, ffn).float()
    logits = torch.randn(20_000, num_experts, generator=torch.Generator().manual_seed(99))
    _, chosen = route_tokens(load_kernels(), logits, ffn, bias)
    counts = torch.bincount(chosen.flatten(), minlength=num_experts) / 20_000
    torch.testing.assert_close(counts.double(), torch.from_numpy(chances), rtol=0.15, atol=0.02)


def test_a_skewed_model_reads_fewer_experts():
    """Of its real routers behind real layers, not of numbers drawn for them."""
    model = load_model("tiny-moe")
    segments = [TokenSegment(list(range(100, 164)), 0, [0, 1, 2, 3])]

    def largest_share(routing):
        decoder = Decoder(model, torch.float32, routing=routing)
        cache, chosen = decoder.new_cache(16), []
        cache.reserve(4)
        grouped = decoder.kernels.grouped_experts

        def counted(x, weights, experts, *rest):
            chosen.append(torch.bincount(experts.flatten(), minlength=8) / len(experts))
            return grouped(x, weights, experts, *rest)

        decoder.kernels.grouped_experts = counted
        with torch.inference_mode():
            decoder.forward(build_batch(segments, 16), cache)
        return torch.stack(chosen).max(dim=1).values.mean().item()

    expected = popularity_of(SKEWED)(8, 2).max(axis=1).mean()
    assert largest_share(SKEWED) == pytest.approx(expected, rel=0.2)
    assert largest_share(ExpertRouting()) < 0.8 * expected  # random hidden states have much in common


def test_experts_with_biases_have_no_capacity():
    biased = tiny((attention(), MoEFFN(4, 2, 16, bias=True)))
    with pytest.raises(PerfmodelError, match="experts with biases are not executed with a fixed capacity"):
        load_decoder(biased, FLOAT32, routing=ExpertRouting(capacity_factor=1))
