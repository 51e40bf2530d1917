"""Random workloads for an engine's scheduler and for ours: small engines under pressure, so that rules decide.

A case is what `perfmodel validate plans` replays, without its steps. Equal seeds draw equal cases.
"""

__all__ = ["FEATURES", "draw_case"]

import random
from itertools import product
from typing import Any

FEATURES = (
    "base",
    "async",
    "abort",
    "pipeline",
    "speculation",
    "states",
    "windows",
    "async-speculation",
    "drafters",
    "whole-prompts",
    "transfer",
    "lora",
    "images",
    "encode-pools",
    "samples",
    "offload",
    "pooling",
    "beams",
    "shapes",
    "suffix",
)

_SPECULATION = ("speculation", "async-speculation", "drafters", "suffix")


def draw_case(seed: int, feature: str = "base") -> dict[str, Any]:
    """One workload that exercises `feature`, one of FEATURES, beside what all do."""
    rng = random.Random(f"{feature} {seed}")
    config = _engine(rng)
    if feature in ("async", "async-speculation") or (feature in ("abort", "states", "windows") and rng.random() < 0.4):
        config["async_scheduling"] = True
    if feature == "whole-prompts":
        config["enable_chunked_prefill"] = False
        config["max_num_batched_tokens"] = config["max_model_len"] + rng.choice([0, 0, 256])
        config["async_scheduling"] = rng.random() < 0.4
    if feature == "pooling":
        config |= {"runner": "pooling", "async_scheduling": rng.random() < 0.3}
        if rng.random() < 0.5:  # an encoder
            config |= {"kv_cache": "off", "enable_prefix_caching": False, "num_blocks": 10**6}
        if "kv_cache" in config or rng.random() < 0.3:
            config |= {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0}
            config["max_num_batched_tokens"] = config["max_model_len"] + rng.choice([0, 0, 256])
    if feature == "pipeline":
        config["pipeline_parallel_size"] = rng.choice([2, 3, 4])
    if feature in _SPECULATION:
        config["num_speculative_tokens"] = rng.choice([1, 2, 3, 5])
    if feature == "drafters":
        config["drafter"] = rng.choice(["eagle", "eagle", "draft_model"])
        config["async_scheduling"] = rng.random() < 0.5
    if feature in ("states", "windows") or (feature == "drafters" and rng.random() < 0.3):
        config["kv_groups"] = _groups(rng, feature, config["block_size"])
        config["enable_prefix_caching"] &= feature != "states"  # off by default for models with states
        config["num_blocks"] *= len(config["kv_groups"])
        if feature != "states" and rng.random() < 0.6:
            config["num_blocks"] = _num_blocks(rng, config)
    requests = _requests(rng, config)
    if feature in ("shapes", "suffix"):
        requests = requests[:5]  # for a small recording
    if feature == "samples":
        config["enable_prefix_caching"] = True
        config["async_scheduling"] = rng.random() < 0.5
        requests = _samples(rng, config)
    if feature == "beams":
        config |= {"enable_prefix_caching": rng.random() < 0.9, "async_scheduling": rng.random() < 0.5}
        requests = _beams(rng, config)
    if feature == "pooling":
        for request in requests:
            request["output"] = 1
    if feature == "transfer":
        config["kv_role"] = rng.choice(["kv_both", "kv_both", "kv_consumer"])
        config["async_scheduling"] = rng.random() < 0.5
        _script_transfers(rng, config, requests)
    if feature == "lora":
        config |= {"enable_lora": True, "max_loras": rng.choice([1, 1, 2, 4]), "async_scheduling": rng.random() < 0.5}
        count, share = config["max_loras"] + rng.choice([0, 1, 3, 12]), rng.choice([1.0, 1.0, 0.7])
        for request in requests:
            if rng.random() < share:
                request["adapter"] = min(int(rng.expovariate(2 / count)), count - 1)
    if feature in ("images", "encode-pools"):
        config["async_scheduling"] = rng.random() < 0.5
        requests = requests[: 20 if feature == "images" else 5]  # for a small recording
        _add_images(rng, config, requests)
    if feature == "encode-pools":
        requests = _apart(rng, config, requests)
    if feature == "offload":
        # Room for all: what vLLM evicts first depends on the order of a set of bytes.
        config["kv_offload"] = {"num_blocks": 100_000, "store_threshold": rng.choice([0, 0, 2, 3])}
        config["async_scheduling"] = rng.random() < 0.5
        config["num_blocks"] = -(-config["max_model_len"] // config["block_size"]) + rng.choice([1, 8, 40])
        config["scheduling_policy"] = "fcfs"
        for request in requests:
            request["load_steps"] = rng.choice([1, 1, 2, 5, 20])
    if feature == "abort" or (feature == "images" and rng.random() < 0.2):
        for request in rng.sample(requests, max(1, len(requests) // 4)):
            request["abort"] = request["arrival"] + rng.randrange(0, 60)
    if feature == "shapes":
        config["async_scheduling"] = rng.random() < 0.5
        if rng.random() < 0.5:
            config["num_speculative_tokens"] = rng.choice([1, 2, 3, 5])
        for request in requests:
            if rng.random() < 0.6:
                request["grammar_steps"] = rng.choice([0, 0, 1, 2, 5, 30])
                if rng.random() < 0.1:
                    request["abort"] = request["arrival"] + rng.randrange(0, 40)
    if "num_speculative_tokens" in config:
        most = config["num_speculative_tokens"]
        # Drafts end where their match or the grammar does; ahead of their verification all are as long.
        is_cut = feature == "suffix" or (feature == "shapes" and not config["async_scheduling"])
        for request in requests:
            request["accepted"] = [rng.randrange(most + 1) for _ in range(rng.choice([1, 3, 7]))]
            if is_cut:
                request["drafts"] = [rng.randrange(most + 1) for _ in range(rng.choice([1, 3, 7]))]
    return {"config": config, "requests": requests}


def _engine(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([8, 16, 16, 16, 32])
    most_tokens = rng.choice([512, 1024, 2048])
    seqs = rng.choice([2, 4, 8, 16, 64])
    tight = max(-(-most_tokens // block_size) + 1, 8)
    return {
        "max_num_seqs": seqs,
        "max_num_batched_tokens": max(seqs, rng.choice([32, 64, 128, 256, 512, 2048])),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.7,
        "enable_chunked_prefill": True,
        "max_model_len": most_tokens,
        "num_blocks": tight + rng.choice([0, 0, rng.randrange(40), rng.randrange(400)]),
        "scheduling_policy": "priority" if rng.random() < 0.35 else "fcfs",
        "long_prefill_token_threshold": rng.choice([0, 0, 0, 16, 40, 64, 200]),
        "scheduler_reserve_full_isl": rng.random() < 0.8,
    }


def _requests(rng: random.Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    most = config["max_model_len"]
    spread = rng.choice([0, 5, 50, 300])
    longest = rng.choice([40, 200, most - 200])
    has_shared = config["enable_prefix_caching"] and rng.random() < 0.7
    groups = [(group, rng.randrange(8, longest)) for group in range(rng.choice([1, 2, 5]))]
    return [
        _request(rng, rng.randrange(spread + 1), longest, rng.choice(groups) if has_shared else (0, 0), config)
        for _ in range(rng.randrange(3, 45))
    ]


def _request(
    rng: random.Random, arrival: int, longest: int, group: tuple[int, int], config: dict[str, Any]
) -> dict[str, Any]:
    prompt = rng.randrange(1, longest)
    shared = min(group[1], prompt - 1) if rng.random() < 0.8 else 0
    if group[1] and rng.random() < 0.15:  # the same prompt as others have, in whole blocks as often as not
        size = config["block_size"]
        prompt = shared = max(group[1] // size * size, size) if rng.random() < 0.5 else group[1]
    output = rng.randrange(1, min(config["max_model_len"] - prompt, rng.choice([4, 40, 180])) + 1)
    drawn = {"arrival": arrival, "prompt": prompt, "output": output, "shared": shared, "group": group[0]}
    return {**drawn, "priority": rng.randrange(3) if config["scheduling_policy"] == "priority" else 0}


def _samples(rng: random.Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Several answers of each prompt, which come at once: what vLLM's ParentRequest makes of `n`."""
    requests = []
    longest = rng.choice([40, 200, config["max_model_len"] - 200])
    for group in range(rng.randrange(1, 8)):
        arrival, prompt = rng.choice([0, rng.randrange(60)]), rng.randrange(1, longest)
        first = _request(rng, arrival, longest, (group, 0), config)
        same = {**first, "prompt": prompt, "shared": prompt}
        most = min(config["max_model_len"] - prompt, 180)
        requests += [{**same, "output": rng.randrange(1, most + 1)} for _ in range(rng.choice([2, 4, 8]))]
    return requests


def _beams(rng: random.Random, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Beam searches, each token of each beam a request, where all go on from the first of the beams before."""
    requests = []
    for group in range(rng.randrange(1, 4)):
        begin, prompt, width = rng.randrange(20), rng.randrange(1, config["max_model_len"] // 2), rng.choice([2, 4])
        for token, beam in product(range(rng.randrange(2, 20)), range(width)):
            if token or not beam:
                own = {"arrival": begin + 3 * token, "prompt": prompt + token, "shared": prompt + token - (beam > 0)}
                requests.append({**own, "output": 1, "group": group, "priority": 0})
    return requests


def _script_transfers(rng: random.Random, config: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Requests whose KV comes from other engines, at once or later, in part or not at all; and goes to others."""
    size, part, is_prompt = config["block_size"], rng.random(), rng.random() < 0.5
    for request in requests:
        prompt = request["prompt"]
        if rng.random() < part:  # a decode engine's: all of the prompt; a store's: whole blocks
            request["load"] = prompt if is_prompt else prompt // size * size
            if is_prompt or rng.random() < 0.5:
                request["load_steps"] = rng.choice([1, 2, 5, 20])
                if rng.random() < 0.15:
                    request["loaded"] = rng.randrange(-(-request["load"] // size) + 1) * size
        if rng.random() < 0.3:  # a prefill engine's
            request["output"] = 1 if rng.random() < 0.5 else request["output"]
            request["send_steps"] = rng.choice([1, 2, 5, 20])


def _add_images(rng: random.Random, config: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """Images in most prompts, some of them alike, of which a step encodes few and the cache holds few."""
    longest = rng.choice([8, 40, 150])
    config["encoder_budget"], config["encoder_cache_size"] = (longest + rng.choice([0, 0, longest, 500]) for _ in "ab")
    config["whole_images"] = longest <= config["max_num_batched_tokens"] and rng.random() < 0.3
    if longest > (config["long_prefill_token_threshold"] or longest):
        config["whole_images"] = False  # an image longer than all chunks would never begin
    num_contents = rng.choice([2, 10, 1000])
    sizes = [rng.randrange(1, longest + 1) for _ in range(num_contents)]
    for request in requests:
        rest, images = rng.randrange(0, request["prompt"]), []
        while rng.random() < 0.8:
            content = rng.randrange(num_contents)
            if rest + sizes[content] > request["prompt"]:
                break
            images.append([rest, sizes[content], content])
            rest += sizes[content] + rng.choice([0, 0, 1, 30])
        request["images"] = images


def _apart(rng: random.Random, config: dict[str, Any], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The engine before an encode pool, or one of the pool, which gets each image as a request of its own."""
    is_encoder = rng.random() < 0.5
    config["ec_role"] = "ec_producer" if is_encoder else rng.choice(["ec_consumer", "ec_consumer", "ec_both"])
    config["num_encoded"] = 0 if is_encoder else rng.choice([1, 5, 1000])
    if not is_encoder:
        for request in requests:
            request["output"] = min(request["output"], 4)
        return requests
    config |= {"mm_encoder_only": True, "enable_prefix_caching": False, "num_blocks": 10**6}
    images = [(request, image) for request in requests for image in request["images"]]
    return [
        {**request, "prompt": size + before, "output": 1, "shared": 0, "images": [[before, size, content]]}
        for (request, (_, size, content)), before in ((one, rng.choice([0, 0, 5])) for one in images)
    ] or [{**requests[0], "output": 1, "shared": 0, "images": []}]


def _groups(rng: random.Random, feature: str, block_size: int) -> list[dict[str, Any]]:
    """Groups of layers as models have them: full attention beside windows, chunks or states; windows of two lengths,
    windows and chunks, windows alone."""
    count = rng.choice([1, 1, 2, 5])
    if feature == "states":
        return [{"kind": "full"}] + [{"kind": "state"}] * count
    kinds = ["window", "window", "chunk"][: 2 if feature == "drafters" else 3]  # vLLM refuses EAGLE with chunks
    others = [_group(rng, block_size, kinds)] * count
    if rng.random() < 0.25:
        others += [_group(rng, block_size, kinds)]
    is_without_full = rng.random() < 0.15 and len(others) > 1
    return others if is_without_full else [{"kind": "full"}, *others]


def _group(rng: random.Random, block_size: int, kinds: list[str]) -> dict[str, Any]:
    kind, span = rng.choice(kinds), block_size * rng.choice([2, 4, 8])
    return {"kind": kind, "span": span + (rng.choice([0, 0, 1, -1, 5]) if kind == "window" else 0)}


def _num_blocks(rng: random.Random, config: dict[str, Any]) -> int:
    """Few blocks for groups with windows: somewhat more than what one sequence may take."""
    size, longest = config["block_size"], config["max_model_len"]
    in_flight = (1 + config.get("async_scheduling", False)) * config["max_num_batched_tokens"]
    spans = [min(group.get("span", longest) + in_flight, longest) for group in config["kv_groups"]]
    return sum(-(-span // size) + 1 for span in spans) + rng.choice([0, 0, rng.randrange(20), rng.randrange(80)])
