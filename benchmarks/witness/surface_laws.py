"""Whether a server's counters agree with what it was sent: differences of counters between two scrapes."""

__all__ = ["laws"]

import json
import time
from collections.abc import Callable
from typing import Any

from surface_requests import MODEL, Ask
from surface_shapes import Answer

_NAMES = {
    "prompt tokens": "vllm:prompt_tokens_total",
    "generated tokens": "vllm:generation_tokens_total",
    "answers": "vllm:request_success_total",
    "first tokens": "vllm:time_to_first_token_seconds_count",
    "ends": "vllm:e2e_request_latency_seconds_count",
    "prompts by size": "vllm:request_prompt_tokens_sum",
    "answers by size": "vllm:request_generation_tokens_sum",
    "max_tokens": "vllm:request_params_max_tokens_sum",
    "n": "vllm:request_params_n_sum",
    "HTTP requests": "http_requests_total",
}
_HANDLERS = ("/v1/completions", "/v1/chat/completions")


def laws(send: Callable[[Ask], Answer]) -> dict[str, list[float]]:
    """[counted, sent] by what is counted, of a few requests with one answer each."""
    before, sums = _sums(send), {"prompt": 0, "completion": 0}
    bodies: list[tuple[str, dict[str, Any]]] = []
    for number in range(6):
        more = {"model": MODEL, "max_tokens": 4 + number, "ignore_eos": True, "temperature": 0}
        bodies.append((_HANDLERS[0], {**more, "prompt": "balo benu " * (number + 1)}))
        bodies.append((_HANDLERS[1], {**more, "messages": [{"role": "user", "content": "balo " * (number + 1)}]}))
    for path, body in bodies:
        usage = json.loads(send(Ask("", "POST", path, body)).body)["usage"]
        sums["prompt"] += usage["prompt_tokens"]
        sums["completion"] += usage["completion_tokens"]
    time.sleep(0.5)  # until counters of the last are there
    after = _sums(send)
    sent = dict.fromkeys(_NAMES, float(len(bodies)))
    sent["prompt tokens"] = sent["prompts by size"] = float(sums["prompt"])
    sent["generated tokens"] = sent["answers by size"] = float(sums["completion"])
    sent["max_tokens"] = float(sum(body["max_tokens"] for _, body in bodies))
    return {name: [after.get(its, 0.0) - before.get(its, 0.0), sent[name]] for name, its in _NAMES.items()}


def _sums(send: Callable[[Ask], Answer]) -> dict[str, float]:
    """Samples of /metrics by name, added up over labels; of HTTP requests those of the two paths alone."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(send(Ask("", "GET", "/metrics")).body.decode()):
        for sample in family.samples:
            if sample.labels.get("handler", _HANDLERS[0]) in _HANDLERS:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
