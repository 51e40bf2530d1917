"""Work of libraries on the host: grammars of required shapes and their masks, and suffix decoding's trees.

    python benchmarks/host_libraries.py VOCABULARY.tiktoken [--write]

runs in an environment with vLLM (`make witness` makes one), whose xgrammar and llguidance it times, and with
arctic-inference 0.1.1, of which csrc/suffix_decoding alone has to be compiled; with a vocabulary in tiktoken's format,
as Qwen's of 151,643 tokens in PyPI's dashscope (Apache-2.0).

Grammars: for each of SCHEMAS a compiler that knows none compiles it, by one thread, and again; its answer is passed
token by token, a mask before each, as vLLM 0.30 does. Trees: drafts are compared with texts that are known, the help of
Python's own topics as it stands there (prose) and copies of it with each 25th word another (edits), as if the model
wrote them; printed beside what `SpeculativeConfig` expects of the acceptance by right tokens in a row that was counted.
With --write, means over schemas of the medians of REPEATS runs go to hardware_specs/calibrations/host_libraries.yaml.
"""

__all__ = ["SCHEMAS"]

import base64
import datetime
import json
import pydoc_data.topics
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import llguidance
import llguidance.numpy
import llguidance.tiktoken
import numpy as np
import tiktoken
import xgrammar
from arctic_inference.suffix_decoding import SuffixDecodingCache
from numpy.typing import NDArray

REPEATS = 5
_FILE = Path(__file__).resolve().parents[1] / "hardware_specs/calibrations/host_libraries.yaml"
_TREE, _PROMPT, _ANSWER, _TEXTS, _LEAST_SEEN = 24, 2000, 300, 60, 30
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


class _Drafts(NamedTuple):
    """What was drafted for texts: per step, and the share that was right after 0, 1, 2 ... right ones in a row.

    step_s: of a sequence and step; prompt_token_s: of a prompt, at its first token"""

    drafted: float
    tokens: float
    right: tuple[float, ...]
    step_s: float
    prompt_token_s: float


def _drafts(texts: list[tuple[NDArray[Any], NDArray[Any]]], most: int, factor: float) -> _Drafts:
    """Draft at most `most` tokens, and `factor` for each that matches, of the answers of `texts`."""
    cache, seen, right = SuffixDecodingCache(_TREE, 10_000), Counter[int](), Counter[int]()
    num_drafted, num_steps, num_tokens, step_s, prompt_s = 0, 0, 0, 0.0, 0.0
    for number, (prompt, answer) in enumerate(texts):
        prompt_s += _seconds(lambda: cache.start_request(number, prompt))[0]  # noqa: B023
        context, place, run = list(prompt), 0, 0
        new = [int(answer[0])]
        while place + len(new) < len(answer):
            context += new
            place += len(new)
            took, draft = _seconds(lambda: _step(cache, number, new, context, most, factor))  # noqa: B023
            pairs = zip(draft, answer[place:], strict=False)
            accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            step_s, num_drafted, num_steps = step_s + took, num_drafted + len(draft), num_steps + 1
            new = [int(token) for token in answer[place : place + accepted + 1]]
            num_tokens += len(new)
            goes_on = accepted == len(draft) and len(new) > accepted
            if goes_on:  # would the model's own token have been drafted?
                behind = np.array((context + new[:-1])[-_TREE:], dtype=np.int32)
                foreseen = cache.speculate(number, behind, max_spec_tokens=1).token_ids
                goes_on = bool(foreseen) and foreseen[0] == new[-1]
            in_row = range(run, run + accepted + goes_on)
            right.update(in_row)
            seen.update([*in_row] if goes_on else [*in_row, run + accepted])
            run = run + accepted + 1 if goes_on else 0
        cache.stop_request(number)
    known = takewhile(lambda count: seen[count] >= _LEAST_SEEN, range(len(seen)))
    rates = tuple(round(right[count] / seen[count], 2) for count in known)
    means = step_s / num_steps, prompt_s / sum(len(prompt) for prompt, _ in texts)
    return _Drafts(num_drafted / num_steps, num_tokens / num_steps, rates, *means)


def _step(
    cache: SuffixDecodingCache, number: int, new: list[int], context: list[int], most: int, factor: float
) -> list[int]:
    """What vLLM's proposer does for a sequence (vllm/v1/spec_decode/suffix_decoding.py)."""
    cache.add_active_response(number, new)
    pattern = np.array(context[-_TREE:], dtype=np.int32)
    draft = cache.speculate(number, pattern, max_spec_tokens=most, max_spec_factor=factor, min_token_prob=0.1)
    return list(draft.token_ids)


def _texts(name: str) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Prompts and answers, in words."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(pydoc_data.topics.topics.values()))
    ids = dict[str, int]()
    tokens = np.array([ids.setdefault(word, len(ids)) for word in words], dtype=np.int32)
    rng, texts = random.Random(0), []
    for _ in range(_TEXTS):
        first = rng.randrange(len(tokens) - _PROMPT - _ANSWER)
        prompt = tokens[first : first + _PROMPT]
        answer = tokens[first + _PROMPT : first + _PROMPT + _ANSWER]
        if name == "edits":
            answer = prompt[:_ANSWER].copy()
            for place in rng.sample(range(_ANSWER), _ANSWER // 25):
                answer[place] = rng.randrange(len(ids))
        texts.append((prompt, answer))
    return texts


def _suffix() -> _Drafts:
    """Print drafts of both texts beside the law; return those of prose at vLLM's defaults."""
    from perfmodel.specs.engine.speculation import SpeculativeConfig

    result = None
    for name in ("prose", "edits"):
        texts = _texts(name)
        for most, factor in ((_TREE, 1.0), (_TREE, 2.0), (5, 1.0)):
            drafts = _drafts(texts, most, factor)
            result = result or drafts
            block = {"method": "suffix", "num_speculative_tokens": most, "suffix_decoding_max_spec_factor": factor}
            config = SpeculativeConfig.model_validate({**block, "acceptance": {"per_position": drafts.right}})
            print(f"{name} at most {most} x {factor:g}: {drafts.tokens:.2f} tokens of {drafts.drafted:.2f} drafted")
            print(f"  expected: {config.expected_tokens():.2f} tokens of {config.mean_depth:.2f} drafted")
            print(f"  {drafts.step_s * 1e6:.1f} us a step, {drafts.prompt_token_s * 1e6:.2f} us a token of the prompt")
            print(f"  right after so many in a row: {drafts.right[:12]}")
    assert result is not None
    return result


def _in_words(name: str, seconds: list[float]) -> str:
    first, again, fill, accept = seconds
    return f"{name}: compile {first * 1e3:.2f} ms, again {again * 1e3:.3f} ms, mask {1e6 * (fill + accept):.1f} us"


def main(vocabulary: str, *flags: str) -> None:
    """Time all; print, and with --write write the file."""
    lines = Path(vocabulary).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    end = {"<|endoftext|>": len(ranks)}
    encoding = tiktoken.Encoding("qwen", pat_str=_QWEN, mergeable_ranks=ranks, special_tokens=end)
    tokens = [*sorted(ranks, key=ranks.__getitem__), *(name.encode() for name in end)]
    grammars = dict[str, dict[str, Any]]()
    for package, name, kind in (("xgrammar", "xgrammar", _XGrammar), ("llguidance", "guidance", _Guidance)):
        runs = list(_runs(kind(tokens, encoding), encoding))
        medians = []
        for own in SCHEMAS:
            row = [median(column) for column in zip(*(run[1:] for run in runs if run[0] == own), strict=True)]
            medians.append(row)
            print(_in_words(f"{name} {own}", row))
        means = [mean(column) for column in zip(*medians, strict=True)]
        first, again, fill, accept = means
        print(_in_words(f"{name} in the mean", means))
        seconds = {"compile_s": first, "again_s": again, "mask_s": fill + accept}
        grammars[name] = {
            "library": f"{package} {version(package)}",
            **{key: float(f"{value:.3g}") for key, value in seconds.items()},
        }
    drafts = _suffix()
    trees = {"step_s": drafts.step_s, "prompt_token_s": drafts.prompt_token_s}
    suffix = {"library": "arctic-inference 0.1.1", **{key: float(f"{value:.3g}") for key, value in trees.items()}}
    document = {
        "source": f"three libraries, timed on one core of an x86-64 server; a vocabulary of {len(tokens):,} tokens",
        "date": str(datetime.date.today()),
        "command": "python benchmarks/host_libraries.py VOCABULARY --write",
        **{"grammars": grammars, "suffix": suffix},
    }
    if "--write" in flags:
        from perfmodel.files.fitted import write_fitted

        write_fitted(document, _FILE)


if __name__ == "__main__":
    main(*sys.argv[1:])
