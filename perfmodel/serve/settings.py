"""`ServerSettings`: where the emulator listens, to whom it answers, and what it bounds; faults that it injects."""

from dataclasses import dataclass, field
from math import inf, isnan, nan
from pathlib import Path
from typing import Literal

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.listening import Bounds

AnswerLength = Literal["requested", "drawn"]
FaultKind = Literal["429", "500", "broken"]

_KINDS: tuple[FaultKind, ...] = ("429", "500", "broken")
_HIGHEST_PORT = 65535


@dataclass(frozen=True)
class InjectedFaults:
    """A share of the requests for answers that fails on purpose, by a draw with the server's seed.

    rate:  share of the requests, from 0 to 1
    kinds: which of them are as likely: 429 and 500 are answered at once; `broken` ends a streamed answer in its middle,
           without its last chunk, and closes the connection of one that is not streamed

    Raises SpecError for a share or a kind that there is not."""

    rate: float = 0.0
    kinds: tuple[FaultKind, ...] = _KINDS

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise SpecError(f"fail: got rate {self.rate:g}; expected 0 to 1, a share of the requests")
        if not self.kinds:
            raise SpecError(f"fail: names no kind; give some of {', '.join(_KINDS)}")
        for kind in self.kinds:
            if kind not in _KINDS:
                raise SpecError(f"fail: got kind {kind!r}; expected {', '.join(_KINDS)}.{did_you_mean(kind, _KINDS)}")

    @classmethod
    def parsed(cls, text: str) -> "InjectedFaults":
        """What `rate=0.01` or `rate=0.01,kinds=429+500` asks for. Raises SpecError for anything else."""
        fields: dict[str, str] = {}
        for part in text.split(","):
            name, value = map(str.strip, part.partition("=")[::2])
            if name not in ("rate", "kinds") or not value:
                raise SpecError(f"fail: got {part.strip()!r}; write rate=0.01, and perhaps kinds=429+500+broken")
            fields[name] = value
        try:
            rate = float(fields.get("rate", "nan"))
        except ValueError:
            rate = nan
        if isnan(rate):
            raise SpecError(f"fail: got {text!r} without a number as its rate; write rate=0.01, a share of requests")
        kinds = fields.get("kinds")
        return cls(rate) if kinds is None else cls(rate, tuple(kinds.split("+")))  # type: ignore[arg-type]  # checked


@dataclass(frozen=True)
class ServerSettings(Bounds):
    """How the emulator serves, and within which bounds: a body has `arrival_s` to come in, too, and the request of a
    client that reads nothing for `stalled_s` is aborted. Raises SpecError for what no server can do.

    host, port:      where it listens; port 0 = any free one
    allowed_hosts:   names that a Host header may have beside those of this machine; "*" = any. What is bound beyond
                     loopback answers to any address in figures, which no rebinding of a domain's name can give
    api_key:         what `Authorization: Bearer` has to carry for paths below /v1; None: nothing
    served_names:    of the model, the first in its answers; empty: the scenario's model
    lora_names:      adapters that are listed, and asked for, as models
    tokenizer_file:  a tokenizer.json to count prompts by; None: by the rule of `tokens.ByteTokens`
    seed:            of answers, their drawn lengths and injected faults
    answer_length:   requested: max_tokens, where a request gives it, else drawn from the scenario's traffic
                     drawn: where the model would end; max_tokens only cuts it off, as on a real server
    faults:          what fails on purpose
    cold_start_s:    simulated seconds that it answers 503, as if weights were loading
    drain_s:         seconds, once told to end, for answers under way
    max_body_bytes:  of a request
    max_answers:     of one request: its prompts times `n`"""

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    served_names: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    tokenizer_file: Path | None = None
    seed: int = 0
    answer_length: AnswerLength = "requested"
    faults: InjectedFaults = InjectedFaults()
    cold_start_s: float = 0.0
    drain_s: float = 30.0
    max_body_bytes: int = 8 * 2**20
    max_answers: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _HIGHEST_PORT:
            raise SpecError(f"port: got {self.port}; expected 0 (any free one) to {_HIGHEST_PORT}")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise SpecError("api_key: got an empty one, or one that no header can carry; expected printable ASCII")
        if self.answer_length not in ("requested", "drawn"):
            raise SpecError(f"answer_length: got {self.answer_length!r}; expected requested, drawn")
        positive = ("arrival_s", "stalled_s", "max_body_bytes", "max_header_bytes", "max_connections", "max_answers")
        for name in ("cold_start_s", "drain_s", *positive):
            value, may_be_0 = getattr(self, name), name not in positive
            if not 0 <= value < inf or (value == 0 and not may_be_0):
                raise SpecError(f"{name}: got {value}; expected {'0 or more seconds' if may_be_0 else 'more than 0'}")
        names = (*self.served_names, *self.lora_names)
        for name in names:
            if not name or names.count(name) > 1:
                raise SpecError(f"served_names, lora_names: got {name!r} empty or twice; name each differently")
