"""`Vocabulary`: from text to token ids and back; `ByteTokens`: by a rule, where no tokenizer is given.

The rule: a text is cut into pieces of four UTF-8 bytes, and each piece is a token; what is left at its end is one more.
English has about four characters a token in vocabularies of today (OpenAI, "What are tokens and how to count them",
help.openai.com, 2023). Each text of a prompt starts anew, so where a conversation goes on, all that was said before has
the tokens that it had, and its KV blocks are found again.

Ids are below 2^32, which readers of KV events take: the bytes of a piece, least first. No byte of UTF-8 is above 0xF7,
so ids whose highest byte is tell of something else: 0xF9 to 0xFB of a piece of one to three bytes, 0xFF of marks.
"""

__all__ = ["FIRST_SPECIAL", "ByteTokens", "TokenIds", "Vocabulary", "Words"]

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int64]

FIRST_SPECIAL = 0xFF << 24  # ids from here on mark where messages begin and end: no text has them
_PIECE = 4
_HIGHEST = 24  # bits below the highest byte
_NO_BYTE = 0xF8  # that byte of a piece that is not whole, less its size
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


class Words(NamedTuple):
    """What answers are made of: each a token, wherever it stands.

    texts, ids:             of words within an answer
    first_texts, first_ids: the same words at its beginning
    """

    texts: list[str]
    ids: TokenIds
    first_texts: list[str]
    first_ids: TokenIds


class Vocabulary(Protocol):
    """Token ids of texts. size: ids are below it"""

    words: Words
    size: int

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids`; those that mark messages have none."""
        ...


class ByteTokens:
    """The rule: a token for each four bytes of UTF-8, and one for what is left. An id is the bytes of its piece."""

    def __init__(self) -> None:
        texts = [f"{first}{vowel}{last} " for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS]
        ids = np.concatenate([self.encode(text) for text in texts])
        self.words, self.size = Words(texts, ids, texts, ids), 1 << 63

    def encode(self, text: str) -> TokenIds:
        """Ids of the pieces of `text`."""
        data = text.encode("utf-8", "surrogatepass")
        whole = np.frombuffer(data, "<u4", count=len(data) // _PIECE).astype(np.int64)
        rest = len(data) % _PIECE
        if not rest:
            return whole
        return np.append(whole, int.from_bytes(data[-rest:], "little") | (_NO_BYTE + rest << _HIGHEST))

    def decode(self, ids: TokenIds) -> str:
        """The text that these pieces make; what is no UTF-8 is replaced."""
        pieces = []
        for number in ids.tolist():
            if 0 <= number < FIRST_SPECIAL:
                highest = number >> _HIGHEST
                size = highest - _NO_BYTE if highest > _NO_BYTE else _PIECE
                pieces.append(number.to_bytes(_PIECE, "little")[: min(size, _PIECE)])
        return b"".join(pieces).decode("utf-8", "replace")
