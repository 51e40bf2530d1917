"""Random workloads for llama-server's slots and for ours: few slots, small batches, prompts that begin alike.

A case is what `perfmodel validate plans` replays, without its steps. Its arrivals are when a client sends, in
milliseconds; the step before which the server sees a request is read from its log. Equal seeds draw equal cases.
"""

__all__ = ["SLOT_FEATURES", "draw_slot_case"]

import random
from typing import Any

SLOT_FEATURES = ("slots", "similar", "saved", "unified")
MAX_MODEL_LEN = 1024


def draw_slot_case(seed: int, feature: str = "slots") -> dict[str, Any]:
    """One workload that exercises `feature`, one of SLOT_FEATURES.

    slots: unlike prompts; similar: prompts that begin alike; saved: the same with --cache-ram; unified: with
    --kv-unified, too
    """
    rng = random.Random(f"llama-server {feature} {seed}")
    num_slots = rng.choice([1, 2, 3, 4, 4, 8])
    config: dict[str, Any] = {
        "max_num_seqs": num_slots,
        "max_num_batched_tokens": rng.choice([64, 96, 128, 256, 512]),
        "block_size": 1,
        "enable_prefix_caching": feature != "slots" or rng.random() < 0.5,
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": num_slots * MAX_MODEL_LEN,
    }
    if feature in ("saved", "unified"):
        config["cache_ram"] = True
    if feature == "unified":
        config["kv_unified"] = True
    return {"config": config, "requests": _requests(rng, feature != "slots")}


def _requests(rng: random.Random, has_shared: bool) -> list[dict[str, Any]]:
    spread, longest = rng.choice([0, 20, 100, 400]), rng.choice([60, 300, 800])
    groups = [(group, rng.randrange(8, longest)) for group in range(rng.choice([1, 2, 4]))]
    return [
        _request(rng, rng.randrange(spread + 1), longest, rng.choice(groups) if has_shared else (0, 0))
        for _ in range(rng.randrange(3, 30))
    ]


def _request(rng: random.Random, arrival_ms: int, longest: int, group: tuple[int, int]) -> dict[str, Any]:
    prompt = rng.randrange(2, longest)
    shared = min(group[1], prompt - 1) if rng.random() < 0.8 else 0
    if group[1] and rng.random() < 0.15:  # the same prompt as others have
        prompt = shared = group[1]
    output = rng.randrange(1, min(MAX_MODEL_LEN - prompt - 8, rng.choice([4, 40, 150])) + 1)
    return {"arrival": arrival_ms, "prompt": prompt, "output": output, "shared": shared, "group": group[0]}
