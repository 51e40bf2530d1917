"""The openai Python client against a server: many requests at once, streamed and whole, and what it measures.

    python benchmarks/emulator_parts/clients.py URL --concurrency 200 --requests 200 [--whole]

It is a process of its own, as a client would be, and prints one JSON document.
"""

__all__ = ["main"]

import argparse
import asyncio
import json
import resource
import statistics
import time
from collections import Counter
from typing import NamedTuple

from openai import APIError, AsyncOpenAI

_PROMPT = "Say how far it is from here to there, and how long one has been under way when one arrives. "


class Measured(NamedTuple):
    """A request's seconds to its first token and to its end, chunks that carried text, and the tokens that it used."""

    ttft: float | None
    e2el: float
    num_chunks: int
    num_tokens: int


async def _streamed(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> Measured:
    begun, first, chunks, used = time.perf_counter(), None, 0, 0
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            chunks += 1
            first = first or time.perf_counter()
            last = time.perf_counter()
        if chunk.usage is not None:
            used = chunk.usage.completion_tokens
    assert first is not None
    return Measured(first - begun, last - begun, chunks, used)


async def _whole(client: AsyncOpenAI, model: str, prompt: str, num_tokens: int) -> Measured:
    begun = time.perf_counter()
    answer = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=num_tokens,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.choices[0].message.content
    return Measured(None, time.perf_counter() - begun, 1, answer.usage.completion_tokens)


async def _all(asked: argparse.Namespace) -> list[Measured | APIError]:
    client = AsyncOpenAI(base_url=f"{asked.url}/v1", api_key="none", max_retries=0, timeout=asked.limit_s)
    model = (await client.models.list()).data[0].id
    ask, places = _whole if asked.whole else _streamed, asyncio.Semaphore(asked.concurrency)

    async def one(number: int) -> Measured | APIError:
        prompt = f"{number}. " + _PROMPT * (asked.prompt_tokens * 4 // len(_PROMPT) + 1)
        async with places:
            try:
                return await ask(client, model, prompt[: asked.prompt_tokens * 4], asked.output_tokens)
            except APIError as error:
                if not asked.fails:
                    raise
                return error

    async with client:
        return await asyncio.gather(*(one(number) for number in range(asked.requests)))


def _mean_ms(values: list[float]) -> float | None:
    return 1e3 * statistics.fmean(values) if values else None


def main() -> None:
    """Send the requests, and print what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--concurrency", type=int, default=200)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--fails", action="store_true", help="requests may fail, and are counted")
    asked = parser.parse_args()
    begun = time.perf_counter()
    ended = asyncio.run(_all(asked))
    seconds = time.perf_counter() - begun
    result = [item for item in ended if isinstance(item, Measured)]
    used = resource.getrusage(resource.RUSAGE_SELF)
    per_token = [(item.e2el - item.ttft) / (item.num_tokens - 1) for item in result if item.ttft is not None]
    answer = {
        "requests": len(result),
        "failed": dict(Counter(str(item)[:100] for item in ended if not isinstance(item, Measured))),
        "tokens": sum(item.num_tokens for item in result),
        "chunks": sum(item.num_chunks for item in result),
        "seconds": seconds,
        "cpu": (used.ru_utime + used.ru_stime) / seconds,
        "ttft": _mean_ms([item.ttft for item in result if item.ttft is not None]),
        "tpot": _mean_ms(per_token),
        "e2el": _mean_ms([item.e2el for item in result]),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
