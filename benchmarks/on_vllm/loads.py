"""The loads that are measured, and which of them a calibration is fitted to; one scenario each, changed by `--set`.

Engines are few, since each is a start of vLLM: all loads of one are served by it one after another.
"""

__all__ = ["ENGINES", "FITTED", "LOADS", "MODELS", "REFERENCE", "Load", "overrides_of", "scenario_text"]

import json
from typing import Any, NamedTuple

MODELS = ("small-dense", "small-moe", "small-mla", "small-hybrid")
_BLOCKS = {"small-mla": 16}  # of tokens; vLLM's reference kernel for latent attention on a CPU has no other

Tokens = tuple[int, int]  # from, to

# Engine -> what is changed of it.
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "few blocks": {"num_gpu_blocks_override": None, "max_model_len": 512},  # as many as hold _FEW_TOKENS
}
_FEW_TOKENS = 640


class Load(NamedTuple):
    """Arrivals, number of requests, ranges of uniform lengths; prefix: shared first tokens, 0: none."""

    arrivals: dict[str, Any]
    num_requests: int
    prompt: Tokens
    answer: Tokens
    engine: str = "plain"
    prefix: int = 0


def _open(rate: float, process: str = "poisson", **more: Any) -> dict[str, Any]:
    return {"process": process, "rate": rate, **more}


def _closed(concurrency: int) -> dict[str, Any]:
    return {"process": "closed_loop", "concurrency": concurrency}


LOADS: dict[str, Load] = {
    "one at a time": Load(_closed(1), 8, (48, 80), (24, 40)),
    "closed 4": Load(_closed(4), 20, (24, 96), (16, 40)),
    "closed 8, short prompts": Load(_closed(8), 24, (8, 24), (24, 56)),
    "closed 2, long prompts": Load(_closed(2), 8, (256, 640), (8, 24)),
    "closed 2, long answers": Load(_closed(2), 4, (16, 48), (96, 160)),
    "closed 16": Load(_closed(16), 48, (8, 48), (8, 32)),
    "open, slow": Load(_open(1.0), 14, (32, 96), (16, 40)),
    "open, fast": Load(_open(2.5), 28, (8, 48), (8, 32)),
    "open, long prompts": Load(_open(0.5), 8, (192, 448), (8, 24)),
    "open, bursty": Load(_open(1.5, "gamma", cv=3.0), 18, (16, 64), (8, 32)),
    "open, constant rate": Load(_open(1.5, "constant"), 18, (16, 96), (8, 32)),
    "all at once": Load({"process": "burst"}, 16, (16, 64), (8, 32)),
    "shared prefix, open": Load(_open(1.2), 14, (144, 224), (8, 24), prefix=128),
    "shared prefix, closed 4": Load(_closed(4), 16, (144, 224), (8, 32), prefix=128),
    "n-gram, closed 2": Load(_closed(2), 10, (24, 64), (24, 48), "ngram"),
    "n-gram, open": Load(_open(1.2), 14, (16, 64), (16, 40), "ngram"),
    "few blocks, closed 8": Load(_closed(8), 16, (48, 80), (48, 80), "few blocks"),
}
FITTED = ("closed 4", "closed 8, short prompts", "closed 2, long prompts", "open, fast", "n-gram, closed 2")
# Brackets each load: one request on an idle engine.
REFERENCE = Load(_closed(1), 1, (32, 32), (16, 16))


def scenario_text(model: str, card: str) -> str:
    """The scenario that all loads of a model change; card: the path of its card."""
    return json.dumps(
        {
            "name": model,
            "model": card,
            "hardware": "cpu",
            "engine": {
                "dtype": "float32",
                "max_num_seqs": 16,
                "max_num_batched_tokens": 256,
                "max_model_len": 1024,
                "block_size": _BLOCKS.get(model, 32),
                "num_gpu_blocks_override": 512,
                "enforce_eager": True,
                "async_scheduling": False,
                "profile": "vllm",
                "version": "0.30.0",
            },
            "traffic": {
                "arrivals": REFERENCE.arrivals,
                "num_requests": 1,
                "input_tokens": {"distribution": "uniform", "low": 32, "high": 32},
                "output_tokens": {"distribution": "uniform", "low": 16, "high": 16},
            },
        }
    )


def overrides_of(model: str, load: Load, seed: int) -> list[str]:
    """What `--set` changes for a load of a model."""
    engine = dict(ENGINES[load.engine])
    if "num_gpu_blocks_override" in engine:
        engine["num_gpu_blocks_override"] = _FEW_TOKENS // _BLOCKS.get(model, 32)
    lengths = {"input_tokens": load.prompt, "output_tokens": load.answer}
    traffic: dict[str, Any] = {"arrivals": load.arrivals, "num_requests": load.num_requests}
    traffic |= {name: {"distribution": "uniform", "low": low, "high": high} for name, (low, high) in lengths.items()}
    if load.prefix:
        traffic["prefix"] = {"shared_tokens": load.prefix, "num_groups": 2}
    changes = {f"traffic.{name}": value for name, value in traffic.items()}
    changes |= {f"engine.{name}": value for name, value in engine.items()}
    return [f"{name}={json.dumps(value)}" for name, value in changes.items()] + [f"seed={seed}"]
