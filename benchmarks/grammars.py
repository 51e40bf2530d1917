"""What answers of a required shape cost the host: compiling a grammar, and a mask of the next token.

    python benchmarks/grammars.py VOCABULARY.tiktoken [--write]

runs in an environment with vLLM (`make witness` makes one), whose xgrammar and llguidance it times, with a vocabulary
in tiktoken's format: Qwen's of 151,643 tokens is in PyPI's dashscope (Apache-2.0). For each of SCHEMAS a compiler that
knows none compiles it, by one thread, and again; its answer is then passed token by token, a mask before each, as
vLLM 0.30 does (`fill_next_token_bitmask`, `accept_token`; `fill_next_token_bitmask`, `consume_tokens`). The medians of
REPEATS runs are written to hardware_specs/calibrations/grammars.yaml."""

__all__ = ["SCHEMAS"]

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import llguidance
import llguidance.numpy
import llguidance.tiktoken
import tiktoken
import xgrammar

REPEATS = 5
_NUM_THREADED = 64  # masks that are filled by one thread and by two
_TEXT, _COUNT, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_QWEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = "Water boils earlier on a mountain, since the air above it weighs less there than at the sea."


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_PLACE = _object(street=_TEXT, city=_TEXT, country={"enum": ["DE", "FR", "JP", "US"]}, lat=_NUMBER, lon=_NUMBER)
_LINE = _object(sku={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"}, count=_COUNT, price=_NUMBER)
# Name -> schema and an answer of that shape.
SCHEMAS: dict[str, tuple[dict[str, Any], Any]] = {
    "label": (_object(label={"enum": ["bug", "feature", "question"]}, sure=_NUMBER), {"label": "bug", "sure": 0.93}),
    "call": (_object(city=_TEXT, days=_COUNT), {"city": "Reykjavik", "days": 5}),
    "person": (
        _object(name=_TEXT, age=_COUNT, email={"type": "string", "format": "email"}, is_member={"type": "boolean"}),
        {"name": "Ada Byron", "age": 36, "email": "ada@example.org", "is_member": True},
    ),
    "summary": (
        _object(title=_TEXT, text=_TEXT, tags={"type": "array", "items": _TEXT}),
        {"title": "Boiling water", "text": " ".join([_WORDS] * 6), "tags": ["physics", "kitchen"]},
    ),
    "order": (
        _object(number=_COUNT, ship_to=_PLACE, bill_to=_PLACE, lines={"type": "array", "items": _LINE}, note=_TEXT),
        {
            "number": 10451,
            "ship_to": {"street": "Rue 4", "city": "Lyon", "country": "FR", "lat": 45.76, "lon": 4.84},
            "bill_to": {"street": "Weg 9", "city": "Ulm", "country": "DE", "lat": 48.4, "lon": 9.99},
            "lines": [{"sku": f"ABC-{1000 + n}", "count": n, "price": 9.5} for n in range(1, 7)],
            "note": _WORDS,
        },
    ),
}


class _XGrammar:
    """xgrammar as vLLM has it, with `tokens`, the bytes of each."""

    def __init__(self, tokens: list[bytes], encoding: tiktoken.Encoding) -> None:
        self._info = xgrammar.TokenizerInfo(tokens, vocab_size=len(tokens), stop_token_ids=[encoding.eot_token])
        self._mask = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compiler(self) -> Callable[[str], Any]:
        return xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=True).compile_json_schema

    def matcher(self, grammar: Any) -> tuple[Callable[[], None], Callable[[int], None]]:
        """(fill a mask, accept a token) of an answer."""
        matcher = xgrammar.GrammarMatcher(grammar)
        return lambda: matcher.fill_next_token_bitmask(self._mask, 0), matcher.accept_token


class _Guidance:
    """llguidance as vLLM has it: a grammar is made anew for each request."""

    def __init__(self, tokens: list[bytes], encoding: tiktoken.Encoding) -> None:
        self._tokenizer = llguidance.tiktoken.lltokenizer_from_encoding(encoding, n_vocab=len(tokens))
        self._mask = llguidance.numpy.allocate_token_bitmask(1, len(tokens))

    def compiler(self) -> Callable[[str], Any]:
        def compiled(schema: str) -> Any:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
            return llguidance.LLMatcher(self._tokenizer, grammar)

        return compiled

    def matcher(self, grammar: Any) -> tuple[Callable[[], None], Callable[[int], None]]:
        matcher = grammar.deep_copy()
        return (
            lambda: llguidance.numpy.fill_next_token_bitmask(matcher, self._mask, 0),
            lambda token: matcher.consume_tokens([token]),
        )


def _seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def _runs(backend: Any, encoding: tiktoken.Encoding) -> Iterator[tuple[str, float, float, float, float]]:
    """(schema, seconds to compile it, to compile it again, mean of a mask, of an accepted token) of each run."""
    for name, (schema, answer) in SCHEMAS.items():
        text, tokens = json.dumps(schema), encoding.encode(json.dumps(answer))
        for _ in range(REPEATS):
            compiled = backend.compiler()
            first, grammar = _seconds(lambda: compiled(text))  # noqa: B023
            again, _ = _seconds(lambda: compiled(text))  # noqa: B023
            fill, accept = backend.matcher(grammar)
            filled, accepted = [], []
            for token in tokens:
                filled.append(_seconds(fill)[0])
                accepted.append(_seconds(lambda: accept(token))[0])  # noqa: B023
            yield name, first, again, mean(filled), mean(accepted)


def _speedup(backend: Any) -> float:
    """How much faster two threads fill masks than one."""
    grammar = backend.compiler()(json.dumps(SCHEMAS["summary"][0]))

    def masks(count: int) -> None:
        fill = backend.matcher(grammar)[0]
        for _ in range(count):
            fill()

    alone = median(_seconds(lambda: masks(2 * _NUM_THREADED))[0] for _ in range(REPEATS))
    with ThreadPoolExecutor(2) as pool:
        both = median(_seconds(lambda: list(pool.map(masks, [_NUM_THREADED] * 2)))[0] for _ in range(REPEATS))
    return alone / both


def main(vocabulary: str, *flags: str) -> None:
    """Time both; print, and with --write write the file."""
    lines = Path(vocabulary).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    encoding = tiktoken.Encoding("qwen", pat_str=_QWEN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})
    tokens = [*sorted(ranks, key=ranks.__getitem__), b"<|endoftext|>"]
    fits = []
    for package, name, kind in (("xgrammar", "xgrammar", _XGrammar), ("llguidance", "guidance", _Guidance)):
        backend = kind(tokens, encoding)
        runs = list(_runs(backend, encoding))
        by_schema = {own: [run[1:] for run in runs if run[0] == own] for own in SCHEMAS}
        rows = {own: [median(column) for column in zip(*found, strict=True)] for own, found in by_schema.items()}
        for own, (first, again, fill, accept) in rows.items():
            print(f"{name:9} {own:8} compile {first * 1e3:8.2f} ms, again {again * 1e3:6.3f} ms, mask {fill * 1e6:6.1f} us, accept {accept * 1e6:5.1f} us")
        means = [mean(column) for column in zip(*rows.values(), strict=True)]
        print(f"{name:9} mean     compile {means[0] * 1e3:8.2f} ms, again {means[1] * 1e3:6.3f} ms, mask {means[2] * 1e6:6.1f} us, accept {means[3] * 1e6:5.1f} us; two threads {_speedup(backend):.2f} times as fast")
        fits.append((name, version(package), len(tokens), means))
    if "--write" in flags:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
