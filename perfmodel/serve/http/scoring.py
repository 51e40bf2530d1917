"""/generative_scoring: how likely the first label is after a query with each item; here a draw, for a token each."""

__all__ = ["ScoringBody", "ScoringShape"]

from typing import Any

from pydantic import model_validator

from perfmodel.serve.http.bodies import GenerationBody, TokenIdList
from perfmodel.serve.http.errors import ErrorStyle, FieldError
from perfmodel.serve.http.shapes import AnswerHead, AskedAnswer, TokenCounts, compact
from perfmodel.serve.tokens import Wanted
from perfmodel.sim.traffic.distributions import uniform_draws


class ScoringBody(GenerationBody):
    """A query, and the items that it is put together with, as texts or as token ids."""

    query: str | TokenIdList | None = None
    items: list[str] | list[TokenIdList] | None = None
    label_token_ids: TokenIdList | None = None
    item_first: bool = False

    @model_validator(mode="after")
    def _is_whole(self) -> "ScoringBody":
        for name in ("query", "items", "label_token_ids"):
            if not getattr(self, name):
                raise FieldError(f"{name}: got none; give at least one")
        return self

    @property
    def parts(self) -> list[list[str | list[int]]]:
        """The texts or token ids of each prompt, one behind the other."""
        query = self.query or ""
        return [[item, query] if self.item_first else [query, item] for item in self.items or ()]

    def wanted(self) -> Wanted:
        """As of a `GenerationBody`: one token of each."""
        return Wanted(max_tokens=1, ignore_eos=True)


class ScoringShape:
    """The scores, of which there is no stream."""

    error_style: ErrorStyle = "openai"

    def __init__(self, head: AnswerHead, asked: list[AskedAnswer]) -> None:
        self._head = {"id": f"generative-scoring-{head.request_id}", "created": head.created, "model": head.model}
        self._asked = asked

    def whole(self, usage: TokenCounts) -> bytes:
        """As of a `WholeShape`."""
        rows: list[dict[str, Any]] = []
        for index, asked in enumerate(self._asked):
            score = float(uniform_draws(int(asked.answer.ids[0]), index, 1)[0])
            rows.append({"index": index, "object": "score", "score": score})
        counts = {**usage.as_json(), "prompt_tokens_details": None, "completion_tokens_details": None}
        return compact({**self._head, "object": "list", "data": rows, "usage": counts})
