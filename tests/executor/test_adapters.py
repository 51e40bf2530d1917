"""Executed LoRA adapters: the logits of merged weights, for each request by itself, whatever its batch mates name."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS, attention, tiny  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.specs import EngineSpec, load_scenario  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.tokens import TokenStore  # noqa: E402

BIASED = tiny((attention(qkv_bias=True, out_bias=True), DenseFFN(40, bias=True, gated=False, activation="gelu")))
LINEAR = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
PROMPTS = {None: (5, 6, 7, 8, 9), 0: (1, 2, 3), 2: (4, 3, 2, 1), 1: (11,)}


def engine(**fields):
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8, "lora_target_modules": LINEAR}
    return EngineSpec(dtype="float32", block_size=4, profile="perfmodel", **(lora | fields))


def merged(decoder, adapter):
    """A plain decoder whose weights have the adapter added: W + B A."""
    layers = []
    for layer in decoder.weights.layers:
        own = {}
        for block in ("mixer", "ffn"):
            held = getattr(layer, block)
            names = [name for name in ("qkv", "out", "up", "down") if hasattr(held, name)]
            weights = {name: getattr(held, name) for name in names}
            plain = {name: w.merged(adapter) if hasattr(w, "merged") else w for name, w in weights.items()}
            own[block] = replace(held, **plain)
        layers.append(replace(layer, **own))
    return Decoder(decoder.model, torch.float32, weights=replace(decoder.weights, layers=layers))


def logits(decoder, segments):
    return decoder.forward(build_batch(segments, 4), decoder.new_cache(4, 16))


@pytest.mark.parametrize("model", [MODELS["gqa"], BIASED], ids=["gated", "biased"])
@pytest.mark.parametrize("modules", [LINEAR, ("qkv_proj",), ("o_proj", "down_proj")], ids=len)
def test_each_request_has_the_logits_of_its_merged_weights(model, modules):
    """Four requests in one step, one without an adapter: rows are grouped by adapter, whatever order they come in."""
    decoder = load_decoder(model, engine(lora_target_modules=modules), seed=3, num_adapters=3)
    blocks = {adapter: (2 * place, 2 * place + 1) for place, adapter in enumerate(PROMPTS)}
    together = logits(decoder, [TokenSegment(p, 0, blocks[a], adapter=a) for a, p in PROMPTS.items()])
    plain = load_decoder(model, engine(), seed=3)
    for row, (adapter, prompt) in zip(together, PROMPTS.items(), strict=True):
        alone = plain if adapter is None else merged(decoder, adapter)
        torch.testing.assert_close(row, logits(alone, [TokenSegment(prompt, 0, (0, 1))])[0], atol=2e-4, rtol=1e-4)
    assert not torch.allclose(together[1], logits(plain, [TokenSegment(PROMPTS[0], 0, (0, 1))])[0], atol=1e-2)


def test_slices_of_queries_keys_and_values_are_ranks_of_their_own():
    """Had all slices one B, keys would see what is A of the queries: vLLM stacks three pairs."""
    decoder = load_decoder(MODELS["gqa"], engine(), seed=1, num_adapters=2)
    weight = decoder.weights.layers[0].mixer.qkv
    assert weight.inputs_ASRK.shape == (2, 3, 8, 32)
    assert [tuple(own.shape) for own in weight.outputs] == [(2, 32, 8), (2, 16, 8), (2, 16, 8)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lora_target_modules": None}, "embedding and LM head"),
        ({"lora_target_modules": ("qkv_proj", "lm_head")}, "embedding and LM head"),
        ({"max_loras": 1}, "more than there are slots"),
    ],
)
def test_what_is_not_executed_is_refused(fields, words):
    with pytest.raises(PerfmodelError, match=words):
        load_decoder(MODELS["gqa"], engine(**fields), num_adapters=2)


def test_a_served_request_is_answered_by_the_adapter_that_it_names(monkeypatch):
    """Equal prompts: with an adapter for each request the answers are others than the model's own."""
    put, answers = TokenStore.put, {}

    def record(self, request, position, token):
        answers[len(runs), request.request_id, position] = token
        put(self, request, position, token)

    monkeypatch.setattr(TokenStore, "put", record)
    overrides = ["traffic.num_requests=3", "traffic.output_tokens.low=4", "traffic.output_tokens.high=6"]
    runs: list[int] = []
    for more in ([], ["traffic.adapters.share=1e-9"], ["traffic.adapters.share=1e-9"]):
        result = execute_scenario(load_scenario("workloads/scenarios/techniques/lora.yaml", [*overrides, *more]))
        runs.append(result.summary["total_output_tokens"])
    named, plain, again = ({key[1:]: token for key, token in answers.items() if key[0] == run} for run in range(3))
    assert plain == again
    assert named.keys() == plain.keys()
    assert sum(named[key] != plain[key] for key in plain) > len(plain) / 2
