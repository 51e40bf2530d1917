"""`chat_prompt`: the messages of a conversation as one prompt.

Each message is four tokens that say whose it is, those of its text, and one that ends it, as in Llama 3's template
(a mark, the role, a mark, a line break; Meta, "Llama 3.1 Model Cards & Prompt formats", llama.com); templates of other
models take as many, give or take two. A prompt ends with the four tokens that begin the answer. So an answer that comes
back as a message of the next turn has the place in its prompt that it had, and its KV blocks with it.
"""

__all__ = ["ChatMessage", "chat_prompt"]

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perfmodel.serve.tokens.vocabulary import FIRST_SPECIAL, TokenIds, Vocabulary

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_BEGIN, _MARK, _BREAK, _END = range(FIRST_SPECIAL, FIRST_SPECIAL + 4)
_FIRST_ROLE = FIRST_SPECIAL + 16
_ENDED = np.array([_END], dtype=np.int64)


class ChatMessage(NamedTuple):
    """Who said it, and what."""

    role: str
    text: str


def chat_prompt(vocabulary: Vocabulary, messages: Iterable[ChatMessage], has_answer: bool = True) -> TokenIds:
    """Token ids of `messages`; `has_answer`: and of the beginning of an answer."""
    parts: list[TokenIds] = []
    for message in messages:
        parts += (_header(message.role), vocabulary.encode(message.text), _ENDED)
    if has_answer:
        parts.append(_header("assistant"))
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _header(role: str) -> TokenIds:
    number = _ROLES.index(role) if role in _ROLES else len(_ROLES)
    return np.array([_BEGIN, _FIRST_ROLE + number, _MARK, _BREAK], dtype=np.int64)
