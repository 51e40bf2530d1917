"""`Collector`: gathers finished requests and step records of a run, on either clock.

Records are columns and can be streamed to files: interrupted runs stay readable, long ones use bounded memory."""

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import MISSING, fields
from math import exp, floor, log, nan, sqrt
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from perfmodel.engine import Request, StepRecord
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.sim.records.columns import RequestColumns, StepColumns

if TYPE_CHECKING:
    from perfmodel.sim.fleet.gateway import Fate

_BIN_WIDTH = log(1.002)  # of gap histograms, logarithmic
REQUEST_COLUMNS = tuple(f.name for f in fields(RequestColumns) if f.default is MISSING)
_TOKEN_COLUMNS = ("reader_wait_s", "max_itl_s")
_TURN_COLUMNS = ("session", "turn")
# A request's row, in the order of `REQUEST_COLUMNS`: these and its replica.
_TIMES = attrgetter("request_id", "arrival", "first_scheduled_at", "first_token_at", "finished_at")
_COUNTS = attrgetter("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")
STEP_COLUMNS = tuple(f.name for f in fields(StepColumns))
_DTYPES = {"d": np.float64, "q": np.int64}
# A step's row is its replica and its record: all of it but the gaps, which go into a histogram.
_GAPS = 1 + StepRecord._fields.index("num_gaps")
_STEP_ROW = (*STEP_COLUMNS[:_GAPS], None, *STEP_COLUMNS[_GAPS:])
_FLUSH_EVERY = 1000  # rows


class GapHistogram:
    """Inter-token gaps in seconds in constant memory (one per output token is too many for a list).

    Bins are 0.2 % wide on a log scale, so percentiles are within 0.1 %; mean and standard deviation are exact."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._sum_squares = 0.0
        self._bins: defaultdict[int, int] = defaultdict(int)

    def add(self, gap_s: float, times: int = 1) -> None:
        """Count `times` gaps of `gap_s`."""
        if times and gap_s > 0:
            self.count += times
            self._sum += times * gap_s
            self._sum_squares += times * gap_s * gap_s
            self._bins[floor(log(gap_s) / _BIN_WIDTH)] += times

    def add_run(self, first_s: float, total_s: float, num_steps: int, times: int) -> None:
        """Count `num_steps` linearly growing gaps, the first `first_s`, in all `total_s`, each for `times` tokens."""
        slope = 0.0 if num_steps == 1 else 2 * (total_s / num_steps - first_s) / (num_steps - 1)
        parts = min(num_steps, 1 + int(abs(slope) * num_steps / (_BIN_WIDTH * first_s)))  # each about as wide as a bin
        done = 0
        for part in range(1, parts + 1):
            upto = num_steps * part // parts
            steps = upto - done
            self.add(first_s + slope * (done + (steps - 1) / 2), steps * times)
            done = upto

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else nan

    @property
    def std(self) -> float:
        return nan if not self.count else sqrt(max(self._sum_squares / self.count - self.mean**2, 0.0))

    def quantile(self, q: float) -> float:
        """The q-quantile of gaps in seconds."""
        if not self.count:
            return nan
        wanted, seen, index = q * self.count, 0, 0
        for index in sorted(self._bins):
            seen += self._bins[index]
            if seen >= wanted:
                break
        return exp((index + 0.5) * _BIN_WIDTH)


class _Table:
    """Numeric columns, kept in memory, written to CSV, or both.

    names: of a row's values, None to skip one; names of times, given in ticks, end with "_s"
    """

    def __init__(self, names: Sequence[str | None], is_kept: bool, path: Path | None) -> None:
        self.is_kept, self._names = is_kept, names
        self._columns = {name: array("d" if name.endswith("_s") else "q") for name in names if name is not None}
        self._rows: list[tuple[int, ...]] = []  # not yet in columns
        self._file: IO[str] | None = None
        if path is not None:
            self._file = path.open("w", encoding="utf-8", newline="\n")
            self._file.write(",".join(self._columns) + "\n")

    def add(self, row: tuple[int, ...]) -> None:
        self._rows.append(row)
        if len(self._rows) >= _FLUSH_EVERY:
            self._settle()

    def close(self) -> None:
        self._settle()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _settle(self) -> None:
        if not self._rows:
            return
        columns: list[Sequence[Any]] = []  # not of `float`: mypyc would take integers for floats
        for name, values in zip(self._names, zip(*self._rows, strict=True), strict=True):
            if name is not None:
                columns.append([ticks / TICKS_PER_S for ticks in values] if name.endswith("_s") else values)
        self._rows.clear()
        if self.is_kept:
            for column, added in zip(self._columns.values(), columns, strict=True):
                column.extend(added)
        if self._file is not None:
            texts = [map(repr, values) for values in columns]
            self._file.write("\n".join(map(",".join, zip(*texts, strict=True))) + "\n")
            self._file.flush()

    def arrays(self) -> dict[str, Any]:
        self._settle()
        return {name: np.frombuffer(column, dtype=_DTYPES[column.typecode]) for name, column in self._columns.items()}


class Collector:
    """Collects the records of a run; a context manager that closes its files.

    out:        folder for `requests.csv` and `steps.csv`, streamed
    keep_steps: keep step records in memory (requests always are: ten numbers each)
    has_token_times: requests are watched token by token; has_turns: they are turns of conversations"""

    def __init__(
        self, out: Path | None = None, keep_steps: bool = True, has_token_times: bool = False, has_turns: bool = False
    ) -> None:
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self._has_token_times, self._has_turns = has_token_times, has_turns
        columns = REQUEST_COLUMNS + (_TOKEN_COLUMNS if has_token_times else ()) + (_TURN_COLUMNS if has_turns else ())
        self._requests = _Table(columns, True, out / "requests.csv" if out else None)
        self._steps = _Table(_STEP_ROW, keep_steps, out / "steps.csv" if out else None)
        self._has_step_sink = keep_steps or out is not None
        self.gaps = GapHistogram()
        self.num_finished = self.num_steps = self.end_tick = self.busy_ticks = 0
        self.used_blocks_peak: dict[int, int] = {}  # by replica
        self.lost: list[tuple[int, Fate]] = []  # request numbers and why they were lost
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._decode_ticks = self._sequence_ticks = 0  # in which replicas decode; of each sequence that does
        self._decoded_until: dict[int, int] = {}  # by replica

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *_: object) -> None:
        self._requests.close()
        self._steps.close()

    def add_request(self, request: Request, replica: int = 0) -> None:
        """Record a finished request."""
        assert request.first_scheduled_at is not None
        assert request.first_token_at is not None
        assert request.finished_at is not None
        self.num_finished += 1
        row = [*_TIMES(request), *_COUNTS(request), replica]
        if self._has_token_times:  # one-token answers given by the prefill engine are not watched
            times = request.token_times
            row += (0, 0) if times is None else (times.reader_wait, times.longest_gap)
        if self._has_turns:
            row += (request.session, request.turn)
        self._requests.add(tuple(row))

    def num_lost(self, fate: "Fate") -> int:
        """Number of requests lost by `fate`."""
        return sum(why == fate for _, why in self.lost)

    def add_step(self, record: StepRecord, replica: int = 0) -> None:
        """Record a finished step or leap."""
        duration = record.end - record.start
        self.num_steps += record.num_steps
        self.busy_ticks += duration
        if record.end > self.end_tick:
            self.end_tick = record.end
        if record.used_blocks > self.used_blocks_peak.get(replica, 0):
            self.used_blocks_peak[replica] = record.used_blocks
        if record.num_drafts:
            self.num_drafts += record.num_drafts
            self.num_draft_tokens += record.num_draft_tokens
            self.num_accepted_tokens += record.num_accepted_tokens
        if record.num_decodes:  # plans in several pipeline stages overlap: count their time once
            self._sequence_ticks += duration * record.num_decodes
            self._decode_ticks += record.end - max(record.start, self._decoded_until.get(replica, 0))
            self._decoded_until[replica] = record.end
        if record.num_gaps:
            if record.num_steps == 1:
                self.gaps.add(duration / TICKS_PER_S, record.num_gaps)
            else:
                first = record.first_duration / TICKS_PER_S
                self.gaps.add_run(first, duration / TICKS_PER_S, record.num_steps, record.num_gaps)
        if self._has_step_sink:
            self._steps.add((replica, *record))

    def add_gap(self, ticks: int, times: int = 1) -> None:
        """Record gaps of `ticks` for requests that sat out steps."""
        self.gaps.add(ticks / TICKS_PER_S, times)

    @property
    def mean_batch(self) -> float | None:
        """Time-averaged decode batch per replica, over the time in which any sequence decodes; None if none did."""
        return self._sequence_ticks / self._decode_ticks if self._decode_ticks else None

    def requests(self) -> RequestColumns:
        """All finished requests."""
        return RequestColumns(**self._requests.arrays())

    def steps(self) -> StepColumns | None:
        """All step records, if kept."""
        return StepColumns(**self._steps.arrays()) if self._steps.is_kept else None
