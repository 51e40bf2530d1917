"""Reads published mean accepted lengths of drafts: CSV with the columns of `COLUMNS`, a row per draft length.

`acceptance_length` counts the model's own token: from 1 (no draft is right) to 1 + `num_speculative_tokens`.
"""

import re
from pathlib import Path
from typing import NamedTuple

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, lenient_rows, named

_SERIES = ("source_path", "model", "mode", "dataset", "measured_on")
COLUMNS = (*_SERIES, "num_speculative_tokens", "acceptance_length")
LENGTH = "acceptance_length"


class DraftSeries(NamedTuple):
    """What was measured at several draft lengths. drafter: the name of the source's file; method: lower case"""

    drafter: str
    model: str
    method: str
    dataset: str
    mode: str

    @property
    def key(self) -> str:
        """Its name in the catalog."""
        return f"{self.drafter} {self.mode} {self.dataset}"


class DraftSetup(NamedTuple):
    """A series, and the number of drafted tokens."""

    series: DraftSeries
    depth: int


def read_acceptance(path: str | Path) -> tuple[list[Observation], Reasons]:
    """Rows of a table, whose setups are `DraftSetup`, and those that cannot be read, with reasons. Raises SpecError for
    another file."""
    return described(named(lenient_rows(path, COLUMNS, "accepted lengths")), _row)


def _row(name: str, entry: Entry) -> Observation:
    depth, length = int(entry["num_speculative_tokens"]), float(entry["acceptance_length"])
    if depth < 1 or not 1 <= length <= 1 + depth:
        raise SpecError(
            f"got acceptance_length {length:g} of {depth} drafted tokens; expected from 1 to {1 + depth}, the model's "
            f"own token included."
        )
    words = re.findall(r"[\w.+-]+", entry["measured_on"])
    drafter, method = Path(entry["source_path"]).stem, words[-1].lower() if words else ""
    series = DraftSeries(drafter, entry["model"], method, entry["dataset"], entry["mode"])
    label = f"{series.key}, {depth} drafted"
    labels = {"model": series.model, "method": method, "mode": series.mode, "dataset": series.dataset}
    labels["drafted tokens"] = f"{depth:02d}"
    return Observation(name, DraftSetup(series, depth), {LENGTH: length}, label=label, labels=labels)
