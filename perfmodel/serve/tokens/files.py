"""`FileTokens`: the vocabulary of a tokenizer.json (Hugging Face's `tokenizers`)."""

__all__ = ["FileTokens"]

from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import MissingExtraError, SpecError
from perfmodel.serve.tokens.vocabulary import FIRST_SPECIAL, TokenIds, Words

_MOST_WORDS = 2048
_FEWEST_WORDS = 8
_USUAL_LETTERS = 5
_SPACES = "Ġ▁"  # how byte-level BPE and SentencePiece write the space before a word
_MOST_LOOKED_AT = 20_000


class FileTokens:
    """Token ids as the tokenizer in the file `path` has them.

    Raises SpecError for a file that is no tokenizer, MissingExtraError without `tokenizers`.
    """

    def __init__(self, path: Path) -> None:
        self._tokenizer = _loaded(path)
        self.words, self.size = _words(self._tokenizer, path), self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`, without any that a tokenizer would put before and after it."""
        clean = text.encode("utf-8", "replace").decode()
        return np.array(self._tokenizer.encode(clean, add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids`; ids that the tokenizer does not know have none."""
        known = [number for number in ids.tolist() if 0 <= number < FIRST_SPECIAL]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text


def _loaded(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError("a tokenizer file needs `tokenizers`: pip install '.[serve]' in the checkout") from None
    if not path.is_file():
        raise SpecError(f"{path}: no such file; give the tokenizer.json of a model")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # what the library raises has no class of its own
        raise SpecError(f"{path}: no tokenizer.json that `tokenizers` reads ({error})") from None


def _words(tokenizer: Any, path: Path) -> Words:
    """Words that are one token at the beginning of a text, and one after a space, and stay so beside each other.

    Where a vocabulary has too few of them, as one of single bytes, its letters, with nothing between them.
    """
    names = {name.lstrip(_SPACES) for name in tokenizer.get_vocab()}
    plain = sorted((name for name in names if name.isascii() and name.isalpha() and name.islower()), key=_oddness)
    for space in (" ", ""):
        chosen = _chosen(tokenizer, plain[:_MOST_LOOKED_AT], space)
        if len(chosen) >= _FEWEST_WORDS:
            texts, firsts, others = zip(*chosen, strict=True)
            return Words([f"{space}{text}" for text in texts], np.array(others), list(texts), np.array(firsts))
    raise SpecError(
        f"{path}: found {len(chosen)} words that are a token each, allowed at least {_FEWEST_WORDS}, for answers; "
        f"give the tokenizer of a language model"
    )


def _chosen(tokenizer: Any, names: list[str], space: str) -> list[tuple[str, int, int]]:
    """(word, its token at the beginning, its token after `space`)"""
    found: list[tuple[str, int, int]] = []
    for name in names:
        first = tokenizer.encode(name, add_special_tokens=False).ids
        twice = tokenizer.encode(f"{name}{space}{name}", add_special_tokens=False).ids
        if len(first) == 1 and len(twice) == 2:
            found.append((name, first[0], twice[1]))
            if len(found) == _MOST_WORDS:
                break
    return found


def _oddness(name: str) -> tuple[int, str]:
    """Words of usual length come first."""
    return abs(len(name) - _USUAL_LETTERS), name
