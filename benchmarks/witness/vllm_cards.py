"""Model cards as vLLM's engine configurations: what the witnesses of memory and of counted work have in common.

A card's configuration goes to vLLM as a config.json without `quantization_config`: weights in bf16, which a CPU takes,
and the comparison does the same on our side.
"""

__all__ = ["cards", "engine_config", "write_answers"]

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1")

import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

# vLLM's text models import classes of vision models, and these torchvision, which the environment has none of.
for _name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
    _module = MagicMock(__path__=[], __spec__=ModuleSpec(_name, None))
    sys.modules[_name] = _module
registry._run_in_subprocess = lambda work: work()  # what a model can do is asked here: a process for each takes long

# Architectures by `model_type` where transformers' table of causal models has none, or another than vLLM.
_ARCHITECTURES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# The text part of these is that of another model, which vLLM has by itself.
_MODEL_TYPES = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "qwen3_vl_moe_text": "qwen3_moe", "qwen3_vl_text": "qwen3"}
# What vLLM's model classes read and cards leave out, since no cost depends on it.
_UNSAID = {
    "mimo_v2_flash": {"layernorm_epsilon": 1e-5, "sliding_window_size": 128},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
}
_folders: list[tempfile.TemporaryDirectory[str]] = []  # some model classes read config.json again


def cards(folder: Path) -> dict[str, dict[str, Any]]:
    """Configurations of the cards in a folder, by name."""
    read = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.yaml")))
    return {card["name"]: card["config"] for card in read}


def engine_config(config: dict[str, Any], block_size: int) -> Any:
    """vLLM's configuration of an engine with that model on one device, and blocks of so many tokens."""
    kind = config["model_type"]
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    plain = {**_UNSAID.get(kind, {}), **plain, "model_type": _MODEL_TYPES.get(kind, kind)}
    named = _ARCHITECTURES.get(kind) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[plain["model_type"]]
    plain.setdefault("architectures", [named])
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    args = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        dtype="bfloat16",
        block_size=block_size,
        max_model_len=min(2048, plain.get("max_position_embeddings", 2048)),
        enable_prefix_caching=False,
    )
    return args.create_engine_config()


def write_answers(
    folder: Path,
    out: Path,
    answer: Callable[[dict[str, Any]], dict[str, Any]],
    facts: dict[str, Any],
    only: Sequence[str] = (),
) -> None:
    """Writes `answer` of every card's configuration, and why a card has none; `facts` stand in front.

    only: names of cards; none: all
    """
    rows, refused = {}, {}
    for name, config in cards(folder).items():
        if only and name not in only:
            continue
        try:
            rows[name] = answer(config)
        except Exception as error:  # whatever vLLM says is its answer
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(name, rows.get(name, refused.get(name)))
    document = {"engine": "vllm", "version": __version__, **facts, "rows": rows, "refused": refused}
    text = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in document.items())
    out.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    """JSON with a line for each model."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    inside = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return f"{{\n{inside}\n }}"
