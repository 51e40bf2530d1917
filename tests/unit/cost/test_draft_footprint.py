"""Room that a drafter takes: KV blocks fall by exactly its weights and its share of each token."""

from dataclasses import replace
from typing import Any

import pytest

from perfmodel.cost import kv_bytes_per_token, plan_memory
from perfmodel.models.params import count_parameters
from perfmodel.ops import Sharding
from perfmodel.specs import load_hardware, load_model
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import Lookahead, SpeculativeConfig

H100 = load_hardware("h100-sxm-80gb")
LLAMA, SMALL = load_model("llama-3.1-8b"), load_model("qwen3-0.6b")
BEFORE = {"version": "0.20"}  # CUDA graphs, of which drafts need more, are outside the share
PLAIN = plan_memory(LLAMA, H100, EngineSpec(**BEFORE))


def plan(**config: Any) -> Any:
    return plan_memory(LLAMA, H100, EngineSpec(**BEFORE, speculative_config=SpeculativeConfig(**config)))


def blocks(weight_bytes: float, per_token: float) -> int:
    room = PLAIN.usable_bytes - PLAIN.weight_bytes - PLAIN.workspace_bytes - weight_bytes
    return int(room // (16 * (PLAIN.kv_bytes_per_token + per_token)))


def test_a_draft_model_takes_its_weights_and_its_share_of_each_token() -> None:
    drafted = plan(method="draft_model", model=SMALL, num_speculative_tokens=4)
    per_token = kv_bytes_per_token(SMALL, Sharding(), list(SMALL.iter_layers()))
    assert drafted.weights["drafter"] == pytest.approx(2 * count_parameters(SMALL).total)
    assert drafted.kv_bytes_per_token == PLAIN.kv_bytes_per_token + per_token
    assert drafted.num_kv_blocks == blocks(drafted.weights["drafter"], per_token)


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "self_skip", "num_speculative_tokens": 4, "draft_layers": 8},
        {"method": "lookahead", "lookahead": Lookahead()},
    ],
)
def test_who_drafts_with_the_model_itself_takes_no_room(config: dict[str, Any]) -> None:
    assert plan(**config).num_kv_blocks == PLAIN.num_kv_blocks


def test_a_drafter_on_its_own_device_takes_no_room_on_the_models() -> None:
    config = {
        "method": "draft_model",
        "model": SMALL,
        "num_speculative_tokens": 4,
        "pipelined": True,
    }
    assert plan(**config).num_kv_blocks < PLAIN.num_kv_blocks
    assert plan(**config, has_own_device=True).num_kv_blocks == PLAIN.num_kv_blocks


def test_heads_layers_and_quantized_weights() -> None:
    d, vocab, layer = LLAMA.hidden_size, LLAMA.vocab_size, LLAMA.layers[0]
    medusa = plan(method="medusa", num_speculative_tokens=4)
    assert medusa.weights["drafter"] == 2 * 4 * (d * d + d * vocab)
    assert medusa.num_kv_blocks == blocks(medusa.weights["drafter"], 0)
    one = replace(LLAMA, layers=((layer[0], 1),))
    params = count_parameters(one)
    eagle = plan(method="eagle", num_speculative_tokens=4)
    own = params.total - params.embedding - params.lm_head - d
    assert eagle.weights["drafter"] == 2 * (own + 2 * d * d)
    assert eagle.kv_bytes_per_token == PLAIN.kv_bytes_per_token * 33 / 32
    quantized = plan(method="self_quantized", quantization="int8", num_speculative_tokens=4)
    assert quantized.weights["drafter"] == pytest.approx(
        (PLAIN.weights["attention"] + PLAIN.weights["dense_ffn"]) / 2, rel=0.01
    )
    assert quantized.kv_bytes_per_token == PLAIN.kv_bytes_per_token


def test_tensor_parallel_devices_share_the_drafter() -> None:
    config = SpeculativeConfig(method="draft_model", model=SMALL, num_speculative_tokens=4)
    one, two = (
        plan_memory(LLAMA, H100, EngineSpec(**BEFORE, speculative_config=config, tensor_parallel_size=tp))
        for tp in (1, 2)
    )
    assert two.weights["drafter"] == pytest.approx(one.weights["drafter"] / 2, rel=0.01)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
