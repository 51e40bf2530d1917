"""Tokens of text: how long prompts are, which KV blocks they share, and what answers say. No seconds, no HTTP."""

__all__ = [
    "AnswerWriter",
    "BoundedTokens",
    "ByteTokens",
    "ChatMessage",
    "FileTokens",
    "Guide",
    "LimitError",
    "Vocabulary",
    "Wanted",
    "WrittenAnswer",
    "block_hashes",
    "chat_prompt",
]

from perfmodel.serve.tokens.answers import AnswerWriter, LimitError, Wanted, WrittenAnswer
from perfmodel.serve.tokens.blocks import block_hashes
from perfmodel.serve.tokens.bounded import BoundedTokens
from perfmodel.serve.tokens.chat import ChatMessage, chat_prompt
from perfmodel.serve.tokens.files import FileTokens
from perfmodel.serve.tokens.guided import Guide
from perfmodel.serve.tokens.vocabulary import ByteTokens, Vocabulary
