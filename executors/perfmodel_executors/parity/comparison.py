"""A decoder loaded from a reference's files beside the reference itself: the largest difference of all logits."""

__all__ = ["BLOCK", "STEPS", "TOLERANCE", "executed", "largest_difference"]

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import Any

import torch

from perfmodel.models import load_model
from perfmodel.specs import EngineSpec
from perfmodel_executors.kernels import Kernels
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.decoder import Decoder, load_decoder
from perfmodel_executors.models.support import CPU
from perfmodel_executors.parity.references import Reference

BLOCK = 4
TOLERANCE = 1e-4  # of a logit in fp32
# (new tokens, tokens before them) of each sequence in each step.
Step = Sequence[tuple[int, int]]
# Prompts in chunks, decodes beside them, and a sequence that comes late.
STEPS: Sequence[Step] = (
    ((7, 0), (30, 0)),
    ((1, 7), (11, 30)),
    ((13, 8), (1, 41)),
    ((1, 21), (1, 42)),
    ((1, 22), (9, 43), (21, 0)),
)


def executed(
    reference: Reference, model: Any, folder: Path, device: torch.device = CPU, kernels: Kernels | None = None
) -> Decoder:
    """The decoder with the weights of `model`, by way of files in `folder`; on `device`, by `kernels` (torch's)."""
    model.save_pretrained(folder)
    engine = EngineSpec(dtype="float32", block_size=BLOCK, max_model_len=reference.max_model_len)
    return load_decoder(load_model(folder / "model.safetensors"), engine, device=device, kernels=kernels)


def largest_difference(decoder: Decoder, model: Any, steps: Sequence[Step] = STEPS, seed: int = 0) -> float:
    """Between all logits of `steps` through the paged cache and those of `model` on the CPU, which sees each sequence
    in one pass; infinity where the likeliest tokens are others."""
    count = max(map(len, steps))
    length = max(new + done for step in steps for new, done in step)
    generator = torch.Generator().manual_seed(seed)
    texts = torch.randint(1, decoder.model.vocab_size, (count, length), generator=generator).tolist()
    width = -(-length // BLOCK)
    tables = [list(range(width * i, width * (i + 1)))[::-1] for i in range(count)]
    with torch.inference_mode():
        expected = [model(torch.tensor([text]), use_cache=False).logits[0].float() for text in texts]
        cache, worst = decoder.new_cache(BLOCK, width * count), 0.0
        for step in steps:
            rows = [(i, done, done + new) for i, (new, done) in enumerate(step) if new]
            segments = [TokenSegment(texts[i][a:b], a, tables[i], is_verified=True) for i, a, b in rows]
            logits = decoder.forward(build_batch(segments, BLOCK, decoder.device), cache).cpu()
            wanted = torch.cat([expected[i][a:b] for i, a, b in rows])
            if not torch.equal(logits.argmax(-1), wanted.argmax(-1)):
                return float("inf")
            apart = float((logits - wanted).abs().max())
            worst = apart if isnan(apart) else max(worst, apart)
            if isnan(worst):
                return worst
    return worst
