"""Engine versions as their `--version` prints them, and the described version for each.

PEP 440 as far as engines use it: `0.21`, `v0.11.1rc2.dev200+g250fb1b8e`, `0.5.9.post1`, `1.3.0rc5`; a nightly without a
number (`nightly-5b8c30d`, `main`) is newer than every release."""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from perfmodel.errors import SpecError

_NUMBERED = re.compile(
    r"v?(?P<release>\d+(?:\.\d+)*)(?P<pre>(?:[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview)[-_.]?\d*)*)"
    r"(?P<post>[-_.]?post\d*)?(?P<dev>[-_.]?dev[-_.\w]*)?(?:\+[\w.]+)?",
    re.IGNORECASE,
)
_NIGHTLY = re.compile(r"(nightly|main|latest|dev|HEAD)\b.*", re.IGNORECASE)

Kind = Literal["release", "post-release", "pre-release", "nightly"]
Age = Literal["described", "older", "newer"]


class ChosenVersion(NamedTuple):
    """asked: as written, or None; described: version that stands for it ("" without versions); age: exact, or nearest
    to one older or newer than all; note: a sentence on a substitution."""

    asked: str | None
    described: str
    age: Age = "described"
    note: str = ""

    @property
    def stand_in(self) -> str:
        """A sentence where an earlier described minor version stands in; else ""."""
        if self.asked is None or not self.described or self.note:
            return ""
        same = parse_version(self.asked)[0][:2] == parse_version(self.described)[0][:2]
        return "" if same else f"{self.asked} has the rules of {self.described}, the last described at or before it"


def parse_version(text: str) -> tuple[tuple[int, ...], Kind]:
    """(release numbers without trailing zeros, kind). Raises SpecError for no version."""
    match = _NUMBERED.fullmatch(text.strip())
    if match is None:
        if _NIGHTLY.fullmatch(text.strip()):
            return (), "nightly"
        raise SpecError(f"{text!r} is not a version; write it as the engine's --version prints it, as in 0.21.0")
    kinds: dict[str, Kind] = {"dev": "nightly", "pre": "pre-release", "post": "post-release"}
    return _numbers(match["release"]), next((kind for group, kind in kinds.items() if match[group]), "release")


def choose_version(asked: str | None, described: Iterable[str]) -> ChosenVersion:
    """Version in `described` for the one `asked`: the last at or before it. Raises SpecError for no version.

    A pre-release counts as its release, whose code it has but for last fixes; a newer nightly as the newest described.
    Patch versions change nothing described here."""
    known = sorted((_numbers(text), text) for text in described)
    release, kind = ((), "release") if asked is None else parse_version(asked)
    if asked is None or not known:
        return ChosenVersion(asked, known[-1][1] if known else "")
    (oldest, first), (newest, last) = known[0], known[-1]
    is_newer = release[:2] > newest[:2]
    if kind == "nightly" and (not release or is_newer):
        return ChosenVersion(asked, last, note=f"nightly build {asked} is taken for {last}, the newest described")
    if release < oldest:
        return ChosenVersion(asked, first, "older", f"{asked} is older than {first}, the oldest described")
    if is_newer:
        return ChosenVersion(asked, last, "newer", f"{asked} is newer than {last}, the newest described")
    note = "" if kind in ("release", "post-release") else f"{kind} {asked} is taken for its release"
    return ChosenVersion(asked, [text for numbers, text in known if numbers <= release][-1], note=note)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [int(part) for part in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
