"""How much of the KV memory that requests hold is empty: the rest of a last block, or of a reservation.

Over the steps in which requests decode, of requests that hold h(n) slots with n tokens in the cache:

    waste = 1 - sum over requests and steps of min(n, span) / sum of h(n)

    paged        h = ceil(min(n, span) / block) block      half a block of a sequence on average
    groups       h = ceil(min(n, span) / block) block, and a row more for a window, in each group of layers
    contiguous   h = max_model_len, or prompt + answer - 1 where that is reserved (or the answer's next power of two)

Buffers for newer tokens in wider formats (`Surplus`) are slots, too, in tokens of the oldest format. Shared blocks
count for each request that holds them. Not counted: what a request of a static batch still holds when its own answer
is complete, room that no request holds, and pieces between reservations that are too short for the next.
Source: Kwon et al. 2023 (PagedAttention), section 3.1.
"""

__all__ = ["kv_cache_waste"]

from collections.abc import Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.memory.groups import kv_groups
from perfmodel.engine.admission import DISCIPLINES
from perfmodel.kv_groups import KVGroup
from perfmodel.models.number_formats import kv_element_bytes, kv_surplus, surplus_tokens
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.formats import served_model
from perfmodel.sim.records.columns import RequestColumns
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario

Floats = NDArray[np.float64]


def kv_cache_waste(scenario: Scenario, requests: RequestColumns) -> float | None:
    """The share of held slots that are empty; None where nothing is held."""
    engine, model = scenario.engine, served_model(scenario.model, scenario.engine)
    if engine.kv_cache == "off" or not len(requests):
        return None
    prompts = requests.num_prompt_tokens.astype(np.float64)
    last = prompts + requests.num_output_tokens - 1  # the last token sampled is never computed
    span = np.full_like(prompts, model.rolling_span or np.inf)
    steps = requests.num_output_tokens.astype(np.float64)
    filled = _sum_min(prompts, last, span) + _sum_surplus(model, prompts, last)
    reserved = _reserved(engine, prompts, steps, scenario)
    block = engine.block_size
    groups = kv_groups(scenario.model, scenario.hardware, engine)
    if groups:
        return _waste_of_groups(groups, prompts, last, block)
    if reserved is None:
        held = block * _sum_blocks(prompts, last, np.ceil(span / block), block)
    else:
        held = steps * block * np.minimum(np.ceil(reserved / block), np.ceil(span / block))
    held = held + steps * block * ceil(surplus_tokens(model) / block)
    total = float(held.sum())
    return max(1.0 - float(filled.sum()) / total, 0.0) if total else None


def _waste_of_groups(groups: Sequence[KVGroup], prompts: Floats, last: Floats, block: int) -> float:
    """The same in slots of one token in one layer, over groups of layers; a block has room for the largest group's.

    prompts, last: tokens of each request when its first and its last token are sampled; block: tokens of a block
    """
    size, filled, held = max(group.num_layers for group in groups), 0.0, 0.0
    for group in groups:
        span = np.full_like(prompts, group.span or np.inf)
        most = np.full_like(prompts, np.inf if group.span is None else group.most_kept(block))
        filled += group.num_layers * float(_sum_min(prompts, last, span).sum())
        held += size * block * float(_sum_blocks(prompts, last, most, block).sum())
    return max(1.0 - filled / held, 0.0)


def _reserved(engine: EngineSpec, prompts: Floats, outputs: Floats, scenario: Scenario) -> Floats | None:
    """Tokens that each request has room for from its beginning; None if as many as it has."""
    longest = float(engine.max_model_len or scenario.model.max_position_embeddings)
    is_contiguous = engine.kv_cache == "contiguous"
    takes_all = DISCIPLINES[engine.batching].reserves_all
    knows = bool(engine.reserve_output) if is_contiguous else engine.rules.reserves_output
    if knows and (is_contiguous or not takes_all):
        if engine.reserve_output == "pow2":
            outputs = 2 ** np.ceil(np.log2(outputs))
        return np.minimum(prompts + outputs - 1, longest)
    return np.full_like(prompts, longest) if is_contiguous or takes_all else None


def _sum_min(first: Floats, last: Floats, most: Floats) -> Floats:
    """Sum of min(n, most) for n = first ... last."""
    cut = np.clip(np.where(np.isinf(most), last, most), first - 1, last)
    below: Floats = (cut - first + 1) * (first + cut) / 2
    above = np.where(cut < last, (last - cut) * np.where(np.isinf(most), 0.0, most), 0.0)
    return below + above


def _sum_surplus(model: ModelSpec, first: Floats, last: Floats) -> Floats:
    """What newer tokens fill beyond one slot each."""
    quantization, total = model.quantization, np.zeros_like(first)
    each = kv_element_bytes(quantization.kv_cache or model.dtype, quantization.kv_group_size)
    for tier in kv_surplus(model):
        total += tier.num_bytes / each * _sum_min(first, last, np.full_like(first, tier.tokens))
    return total


def _sum_blocks(first: Floats, last: Floats, most: Floats, block: int) -> Floats:
    """Sum of min(ceil(n / block), most) for n = first ... last."""
    cut = np.minimum(last, np.where(np.isinf(most), last, np.maximum(most * block, first - 1)))
    below: Floats = _blocks_upto(cut, block) - _blocks_upto(first - 1, block)
    return below + np.where(cut < last, (last - cut) * np.where(np.isinf(most), 0.0, most), 0.0)


def _blocks_upto(last: Floats, block: int) -> Floats:
    """Sum of ceil(n / block) for n = 1 ... last."""
    whole, rest = np.divmod(last, block)
    total: Floats = block * whole * (whole + 1) / 2 + rest * (whole + 1)
    return total
