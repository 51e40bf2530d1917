"""`RequestParams`: what a server knows of a request and its engine does not: metrics and KV events tell of it."""

__all__ = ["RequestParams"]

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class RequestParams(NamedTuple):
    """What a client has asked for, beside counts of tokens.

    finish_reason: "stop" where the text ends there, "length" where its limit of tokens does
    max_tokens:    what the client allows; None: as many as it gets
    n:             answers that it asked for; None for all but one of these
    adapter:       name of the LoRA adapter
    token_ids:     of the prompt and then of the answer
    """

    finish_reason: str = "length"
    max_tokens: int | None = None
    n: int | None = 1
    adapter: str | None = None
    token_ids: NDArray[np.int64] | None = None
