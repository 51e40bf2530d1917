"""`AcceptanceCatalog`: published mean accepted lengths of drafts as laws over the draft length.

With n drafted tokens a step gives, the model's own token included,

    L(n) = 1 + sum over k <= n of a_1 a_2 ... a_k,     a_k = first * decay^(k - 1)

a_k is the probability that drafted token k is right, given that all before it were: a token further ahead is harder to
draft. `hardware_specs/calibrations/acceptance.yaml` has the laws, written by `perfmodel calibrate --acceptance`.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from operator import mul
from typing import Annotated, NamedTuple

from pydantic import Field

from perfmodel.files.base import CheckedSpec, Spec
from perfmodel.files.catalog import data_dir
from perfmodel.files.fitted import CommittedFits, load_fitted
from perfmodel.files.units import PositiveInt

KEYS = ("model", "method", "dataset", "mode")  # by which entries are looked up: what counts most comes first
ANY = "any"


class AcceptanceLaw(Spec):
    """Acceptance of one drafter on one dataset.

    method, mode: as published: eagle3, mtp ...; thinking_on, thinking_off
    first, decay: of the law above
    longest:      number of drafted tokens up to which it was fitted
    """

    model: str
    method: str
    dataset: str
    mode: str
    first: Annotated[float, Field(gt=0, le=1)]
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    longest: PositiveInt

    def rates(self, depth: int) -> tuple[float, ...]:
        """Conditional acceptance of the first `depth` drafted tokens."""
        return tuple(self.first * self.decay**k for k in range(depth))

    def length(self, depth: int) -> float:
        """Mean tokens of a step that drafts `depth` tokens, its own included."""
        return 1.0 + sum(accumulate(self.rates(depth), mul), 0.0)


class LawMatch(NamedTuple):
    """A law for what was asked, and the entries that it is the geometric mean of. is_exact: they are what was asked"""

    law: AcceptanceLaw
    entries: tuple[AcceptanceLaw, ...]
    is_exact: bool


class AcceptanceCatalog(CommittedFits):
    """laws: drafter, mode and dataset -> law

    length_error, model_error: 80th percentile of |log(measured / predicted)| of draft lengths, and of models, that were
                               left out of the fit
    """

    laws: dict[str, AcceptanceLaw] = Field(min_length=1)
    length_error: float = Field(default=0.0, ge=0)
    model_error: float = Field(default=0.0, ge=0)

    def known(self, key: str) -> list[str]:
        """All values of one of `KEYS`, sorted."""
        return sorted({getattr(law, key) for law in self.laws.values()})

    def nearest(self, wanted: Mapping[str, str]) -> LawMatch:
        """The mean of the entries that share most with `wanted` (by `KEYS`; `any` is shared by none)."""

        def shared(law: AcceptanceLaw) -> tuple[bool, ...]:
            return tuple(getattr(law, key) == wanted.get(key) for key in KEYS)

        most = max(map(shared, self.laws.values()))
        entries = tuple(law for law in self.laws.values() if shared(law) == most)
        first, decay = (
            prod(getattr(law, name) for law in entries) ** (1 / len(entries)) for name in ("first", "decay")
        )
        update = {"first": first, "decay": decay, "longest": max(law.longest for law in entries)}
        return LawMatch(entries[0].model_copy(update=update), entries, all(most))


def load_catalog() -> AcceptanceCatalog:
    """The committed catalog. Raises SpecError for a file that is missing or malformed."""
    return load_fitted(AcceptanceCatalog, data_dir("calibrations") / "acceptance.yaml")


class CatalogQuery(CheckedSpec):
    """The entries of the acceptance catalog to use; `any`: the mean of all.

    model, method: unless given, the scenario's where the catalog has them, else any
    dataset, mode: unless given, any; as in dataset: coding, mode: thinking_off
    """

    model: str | None = None
    method: str | None = None
    dataset: str = ANY
    mode: str = ANY

    def _conflicts(self) -> Iterator[str]:
        for key in KEYS:
            value, known = getattr(self, key), load_catalog().known(key)
            if value not in (None, ANY, *known):
                yield f"{key}: got {value!r}; the acceptance catalog has {', '.join(known)}, or take {ANY}"

    def completed(self, model: str, method: str) -> "CatalogQuery":
        """The query of a scenario with `model`, drafting by `method`."""
        catalog, own = load_catalog(), {"model": model, "method": method}
        update = {key: value if value in catalog.known(key) else ANY for key, value in own.items()}
        return self.model_copy(update={key: value for key, value in update.items() if getattr(self, key) is None})

    @property
    def match(self) -> LawMatch:
        return load_catalog().nearest(self.model_dump())

    def note(self, model: str) -> str:
        """A sentence on where the acceptance of drafts for `model` comes from, and how far it may be off."""
        match, catalog = self.match, load_catalog()
        is_own = match.is_exact and match.law.model == model
        named = ", ".join("/".join(dict.fromkeys(getattr(law, key) for law in match.entries)) for key in KEYS)
        error = catalog.length_error if is_own else max(catalog.model_error, catalog.length_error)
        nearest = f"mean of its {len(match.entries)} nearest entries" if len(match.entries) > 1 else "its nearest entry"
        lacks = "" if model == match.law.model else f"the catalog has no {model}; "
        return (
            f"Acceptance of drafts: {lacks}{'entry of the catalog' if match.is_exact else nearest} ({named}); 80 % of "
            f"lengths left out of such fits are within {error:.0%}."
        )
