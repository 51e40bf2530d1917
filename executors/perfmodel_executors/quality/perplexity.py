"""Perplexity of a decoder as it serves: text goes through its KV cache, chunk by chunk."""

__all__ = ["Perplexity", "perplexity"]

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp

import torch
from torch.nn.functional import cross_entropy

from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.runner import StepRunner


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean negative log likelihood of a token, and over how many tokens the mean was taken."""

    value: float
    num_tokens: int


def perplexity(
    runner: StepRunner, ids: Sequence[int], num_tokens: int = 1536, window: int = 512, chunk: int = 512
) -> Perplexity:
    """Perplexity of the tokens after each of `num_tokens`, in windows that know nothing of each other.

    window: tokens of a sequence; the text's next ones begin another
    chunk:  new tokens in a step; 1 goes through the attention of decodes, and reads all that was said from the cache
    """
    windows = min(num_tokens, len(ids) - 1) // window
    if not windows:
        raise ValueError(f"{len(ids)} tokens are less than a window of {window} and the token after it")
    total = sum(_window_loss(runner, ids[i * window : (i + 1) * window + 1], chunk) for i in range(windows))
    return Perplexity(exp(total / (windows * window)), windows * window)


def _window_loss(runner: StepRunner, ids: Sequence[int], chunk: int) -> float:
    """Summed negative log likelihood of ids[1:]."""
    total = 0.0
    blocks = list(range(-(-len(ids) // runner.cache.block_size)))
    for start in range(0, len(ids) - 1, chunk):
        end = min(start + chunk, len(ids) - 1)
        first = start if runner.keeps_kv else 0  # without a cache a step computes all that was said
        segments = [TokenSegment(ids[first:end], first, blocks)]
        runner.reserve_for(segments)
        with torch.inference_mode():
            decoder = runner.decoder
            batch = build_batch(segments, runner.cache.block_size, decoder.device, decoder.ring, runner.keeps_kv)
            rows = torch.arange(start - first, end - first, device=decoder.device)
            logits = decoder.forward(replace(batch, sample_rows_S=rows), runner.cache)
            wanted = torch.tensor(ids[start + 1 : end + 1], device=logits.device)
            total += float(cross_entropy(logits.float(), wanted, reduction="sum"))
    return total
