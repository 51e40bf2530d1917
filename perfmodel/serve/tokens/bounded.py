"""`BoundedTokens`: a vocabulary that is not made to count what no context can hold."""

__all__ = ["BoundedTokens"]

from perfmodel.serve.context import beyond_context
from perfmodel.serve.tokens.vocabulary import TokenIds, Vocabulary

_LONGEST_TOKEN = 128  # characters; the longest runs of spaces that vocabularies have as one token


class BoundedTokens:
    """`vocabulary`, for a context of `max_model_len` tokens: a text that cannot fit costs no time."""

    def __init__(self, vocabulary: Vocabulary, max_model_len: int) -> None:
        self.words, self.size = vocabulary.words, vocabulary.size
        self._vocabulary, self._max_model_len = vocabulary, max_model_len

    def encode(self, text: str) -> TokenIds:
        """Ids of the tokens of `text`. Raises WorkloadError for a text that must have too many."""
        if len(text) > self._max_model_len * _LONGEST_TOKEN:
            raise beyond_context(self._max_model_len, f"a text of {len(text)} characters has more", "shorten it")
        return self._vocabulary.encode(text)

    def decode(self, ids: TokenIds) -> str:
        """The text of `ids`."""
        return self._vocabulary.decode(ids)
