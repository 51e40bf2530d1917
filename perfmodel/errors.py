"""Errors that a user can act on.

    PerfmodelError
    ├── SpecError          a file, a field or a `--set` that cannot be read as what it should be
    │   └── UnsupportedError   a deployment that an engine does not start on the devices
    ├── DoesNotFitError    a model that does not fit the hardware it was asked to run on
    ├── WorkloadError      a trace or a request that cannot be served as described
    └── MissingExtraError  an optional part (torch, ray, pyarrow) that is not installed

Each message is one sentence with the value found, the limit and the way out. The command line prints
it and exits with status 2; anything else that escapes is a bug and shows a traceback."""

from collections.abc import Iterable


class PerfmodelError(Exception):
    """Base of every error that is the input's fault, not the program's."""


class SpecError(PerfmodelError):
    """A specification that cannot be read: `file:line: field: what was found, what is allowed`."""


class UnsupportedError(SpecError):
    """A deployment that an engine does not start: a number format, a degree of parallelism, a size of KV blocks.

    sentence: what was found and what is allowed
    reason:   of this kind of refusal, in short, to count them by
    field:    of the scenario that is to be changed
    place:    of that field in a file, before the sentence"""

    def __init__(self, sentence: str, reason: str, field: str, place: str = "") -> None:
        super().__init__(f"{place}{sentence}")
        self.sentence, self.reason, self.field = f"{field}: {sentence}", reason, field
        self._given = sentence, reason, field, place

    def __reduce__(self) -> tuple[type["UnsupportedError"], tuple[str, ...]]:
        """For processes that pass it on."""
        return type(self), self._given


class DoesNotFitError(PerfmodelError):
    """The weights, or the smallest useful KV cache, exceed the memory of the devices."""


class WorkloadError(PerfmodelError):
    """Traffic that cannot be served as described (an empty trace, a prompt beyond max_model_len)."""


class MissingExtraError(PerfmodelError):
    """An optional dependency is not installed; the message names the extra to install."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x' or 'y'?` for the nearest known names, or an empty string."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
