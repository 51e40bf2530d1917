"""A scenario as arguments of vLLM's engine: what it has names for there; the rest is refused, never dropped."""

import json
from pathlib import Path
from typing import Any

from perfmodel.errors import SpecError, UnsupportedError
from perfmodel.files.catalog import expanded, looked_up
from perfmodel.models.cards import load_card
from perfmodel.models.hub import is_hub_name
from perfmodel.models.model_changes import ModelChanges
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.sampling import settings_of

ENGINE = "vllm"

# Fields with vLLM's own names and meanings; those that a scenario leaves open are the version's defaults on the device.
_ALWAYS = (
    *("max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching"),
    *("enable_chunked_prefill", "scheduling_policy", "async_scheduling"),
    *("tensor_parallel_size", "pipeline_parallel_size", "max_model_len"),
)
_WHERE_GIVEN = (
    *("dtype", "quantization", "kv_cache_dtype", "mamba_ssm_cache_dtype"),
    *("gpu_memory_utilization", "long_prefill_token_threshold", "scheduler_reserve_full_isl"),
    *("disable_hybrid_kv_cache_manager", "enforce_eager", "enable_expert_parallel"),
)
_NOT_ARGUMENTS = {"profile", "calibration", "version", "num_gpu_blocks_override", "speculative_config", "split_kv"}
# Of adapters, whose weights only a server that runs has
_LORA = {"enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank", "lora_target_modules"}
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def refuse_unserved(scenario: Scenario, is_running: bool = False) -> None:
    """Raises UnsupportedError for what vLLM's engine has no argument for, one engine does not serve, or no request
    says. is_running: a server that has been started, with its own arguments"""
    engine, traffic = scenario.engine, scenario.traffic
    name = engine.described.description.name
    if name != ENGINE:
        raise _unserved(f"got engine {name}, which --on vllm does not run; set it to vllm", "engine.profile")
    num_ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if scenario.cluster.is_dynamic or scenario.num_devices != num_ranks:
        raise _unserved("got several replicas or data-parallel ranks; expected one engine of one group", "cluster")
    if scenario.model_changes != ModelChanges() or scenario.prompt_compression is not None:
        raise _unserved("got a changed model or prompts, which vLLM does not make; leave it out", "model_changes")
    if traffic.prompts is not None:
        raise _unserved("got prompts from a text; expected drawn ones; leave it out", "traffic.prompts")
    for name, is_given in (
        ("images", traffic.images is not None),
        ("structured_outputs", traffic.structured_outputs is not None),
        ("beam_width", traffic.beam_width > 1),
    ):
        if is_given:
            raise _unserved("vLLM is asked for plain text only; leave it out", f"traffic.{name}")
    if traffic.adapters is not None and not is_running:
        way_out = "ask a server that has them (--on vllm:http://HOST:PORT), or leave them out"
        raise _unserved(f"got adapters, whose weights an engine is not given here; {way_out}", "traffic.adapters")
    plain, passed = EngineSpec(), {*_ALWAYS, *_WHERE_GIVEN, *_NOT_ARGUMENTS, *(_LORA if is_running else ())}
    for field in sorted(engine.model_fields_set - passed):
        if (value := getattr(engine, field)) != getattr(plain, field):
            raise _unserved(f"got {value!r}, for which vLLM has no argument; leave it out", f"engine.{field}")
    config = engine.speculative_config
    if config is not None and config.method != "ngram":
        raise _unserved(f"got {config.method}; expected ngram: it needs no second model", "engine.speculative_config")


def _unserved(sentence: str, field: str) -> UnsupportedError:
    return UnsupportedError(f"{sentence}.", "not run on vLLM", field, f"{field}: ")


def engine_arguments(scenario: Scenario, model: str, has_weights: bool) -> dict[str, Any]:
    """Arguments of EngineArgs for the model in the folder, or called, `model`; without weights they are drawn."""
    engine = scenario.engine
    drawn = {} if has_weights else {"load_format": "dummy"}
    result: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, **drawn}
    result |= {name: getattr(engine, name) for name in _ALWAYS}
    result["async_scheduling"] = engine.plans_ahead
    result |= {name: getattr(engine, name) for name in _WHERE_GIVEN if name in engine.model_fields_set}
    if engine.num_gpu_blocks_override is not None:
        result["num_gpu_blocks_override"] = engine.num_gpu_blocks_override + 1  # one of vLLM's is the null block
    config = engine.speculative_config
    if config is not None:
        names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        result["speculative_config"] = {name: value for name in names if (value := getattr(config, name)) is not None}
    return result


def sampling_arguments(scenario: Scenario) -> dict[str, Any]:
    settings = settings_of(scenario.sampling, scenario.model)
    if settings is None:
        return {"temperature": 0.0}
    return {**settings._asdict(), "seed": scenario.seed if scenario.sampling.seed is None else scenario.sampling.seed}


def environment_of(scenario: Scenario, is_local: bool) -> dict[str, str]:
    """Variables that vLLM reads, where they are not set already; is_local: the model is on this machine."""
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if is_local:
        environment["HF_HUB_OFFLINE"] = "1"
    if scenario.hardware.kind == "cpu":
        threads = str(scenario.hardware.declared.compute_units)
        environment |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if scenario.engine.num_gpu_blocks_override is not None:
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB; the blocks are counted by the override
    return environment


def write_model(model: str, folder: Path) -> tuple[str, bool]:
    """(what vLLM finds the model by, whether its weights are there); of a card the config.json is written to `folder`.
    model: a folder, a config.json, a card's name or path, or a repository of the Hub. Raises SpecError for others."""
    path = expanded(model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir() and (path / "config.json").is_file():
        if any(any(path.glob(pattern)) for pattern in _WEIGHTS):
            return str(path), True
        return _write(json.loads((path / "config.json").read_text(encoding="utf-8")), folder), False
    if path.is_file() and path.suffix == ".gguf":
        return str(path), True
    card = looked_up("models", model)
    if card is not None:
        return _write(load_card(card).config, folder), False
    if is_hub_name(model):
        return model, True
    raise SpecError(
        f"{model}: vLLM needs a folder with a config.json, a model card or a repository, and found none of them; name "
        f"one as the scenario's model."
    )


def _write(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8", newline="\n")
    return str(folder)
