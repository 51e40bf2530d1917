"""Random workloads for SGLang's scheduler and for ours; as `workloads`, with what only SGLang has.

Requests fit SGLang's own limit on answers, so that it clips none. Equal seeds draw equal cases.
"""

__all__ = ["FEATURES", "draw_case"]

import random
from typing import Any

FEATURES = ("base", "overlap", "estimate", "mixed", "policies", "uncached")


def draw_case(seed: int, feature: str = "base") -> dict[str, Any]:
    """One workload that exercises `feature`, one of FEATURES, beside what all do."""
    rng = random.Random(f"sglang {feature} {seed}")
    config = _engine(rng, feature)
    is_crowded = feature == "policies" and rng.random() < 0.15
    requests = _requests(rng, config, rng.randrange(130, 150) if is_crowded else rng.randrange(3, 30))
    return {"config": config, "requests": requests}


def _engine(rng: random.Random, feature: str) -> dict[str, Any]:
    block_size = rng.choice([1, 1, 8, 16, 16, 32])
    longest = rng.choice([256, 512, 1024])
    mixes = feature == "mixed"
    is_tight = feature == "estimate" or (mixes and rng.random() < 0.4)
    seqs = rng.choice([2, 4, 8, 16] if mixes else [8, 16, 64] if is_tight else [2, 4, 8, 16, 64])
    tight = -(-longest // block_size) + 3
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": rng.choice([64, 128, 256, 512] if mixes else [64, 64, 128, 256, 512, 2048]),
        "block_size": block_size,
        "enable_prefix_caching": feature != "uncached",
        "max_model_len": longest,
        "num_blocks": tight
        + rng.choice([0, rng.randrange(600), rng.randrange(400 if is_tight else 3000)]) // block_size,
        "scheduling_policy": _policy(rng, feature),
        "prefill_exclusive": not mixes,
        "async_scheduling": feature == "overlap" or (feature != "base" and rng.random() < 0.5),
        "ignore_eos": not is_tight and rng.random() < 0.5,
    }


def _policy(rng: random.Random, feature: str) -> str:
    if feature == "policies":
        return rng.choice(["lpm", "lpm", "dfs-weight", "lof", "priority"])
    return "fcfs"


def _requests(rng: random.Random, config: dict[str, Any], count: int) -> list[dict[str, Any]]:
    spread = rng.choice([0, 5, 40, 120])
    is_crowded = count > 100
    longest = rng.choice([40, 120, config["max_model_len"] - 60])
    answers = rng.choice([(1, 4)] if is_crowded else [(1, 30), (1, 90), (60, 100)])
    if not config["ignore_eos"] and not is_crowded and rng.random() < 0.6:  # estimates turn out too low
        spread, longest, answers = 5, 40, (80, 120)
    has_shared = config["enable_prefix_caching"] and rng.random() < 0.7
    groups = [(group, rng.randrange(8, longest)) for group in range(rng.choice([1, 2, 5]))]
    shared = [rng.choice(groups) if has_shared else (0, 0) for _ in range(count)]
    return [_request(rng, rng.randrange(spread + 1), longest, answers, group, config) for group in shared]


def _request(
    rng: random.Random,
    arrival: int,
    longest: int,
    answers: tuple[int, int],
    group: tuple[int, int],
    config: dict[str, Any],
) -> dict[str, Any]:
    prompt = rng.randrange(1, longest)
    shared = min(group[1], prompt - 1) if rng.random() < 0.8 else 0
    if group[1] and rng.random() < 0.15:  # the same prompt as others have, in whole blocks as often as not
        size = config["block_size"]
        prompt = shared = max(group[1] // size * size, size) if rng.random() < 0.5 else group[1]
    most = min(config["max_model_len"] - prompt - 2, answers[1])
    output = rng.randrange(min(answers[0], most), most + 1)
    drawn = {"arrival": arrival, "prompt": prompt, "output": output, "shared": shared, "group": group[0]}
    return {**drawn, "priority": rng.randrange(3) if config["scheduling_policy"] == "priority" else 0}
