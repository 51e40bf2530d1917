"""`TokenWatch`: the longest gap between a request's tokens, and how long its reader waits.

A reader starts at the first token and takes `pace` ticks for each. Token k (from 0), at the time T_k, is read in time
if T_k <= T_0 + k pace, so what it comes late is T_k - T_0 - k pace, and a reader who goes on as soon as there is
something to read has waited, in all, the most of these (as in playing a video).

Requests that decode together get a token each in every step (`DecodeCohort`), so single requests are not looked at: at
the cohort's age a, with the time T, a member is late by (T - a pace) and a constant of its own. The most of that line
since the member joined is looked up when it leaves, in a stack of falling values. A leap adds two entries. Steps cost
what changes, here too; without a watch they cost nothing.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

from perfmodel.engine.request import Request, TokenTimes

_FEWEST_KEPT = 64
_NONE = -(2**62)


class TokenWatch:
    """Watches the requests of one engine.

    pace_of: ticks that the reader of a request takes for a token; None: without a reader
    """

    def __init__(self, pace_of: Callable[[Request], int | None]) -> None:
        self._pace_of = pace_of
        self._gaps = _MostSince()
        self._lines: dict[int, _MostSince] = {}  # by pace
        self._ends: list[int] = []  # of the steps of a leap
        self._fresh: dict[Request, int] = {}  # members that have no token of the cohort's yet -> age when they joined

    def take(self, request: Request, now: int) -> None:
        """`request`, of no cohort, has its tokens now; `last_token_at` is that of the ones before."""
        times = request.token_times
        if times is None:
            request.token_times = times = TokenTimes(now, self._pace_of(request))
        elif request.last_token_at is not None:
            times.longest_gap = max(times.longest_gap, now - request.last_token_at)
        if times.pace is not None:
            times.reader_wait = max(times.reader_wait, now - times.first_at - times.num_tokens * times.pace)
        times.num_tokens = request.num_output_tokens

    def join(self, request: Request, age: int) -> None:
        """`request` is of the cohort from `age` on."""
        self._fresh[request] = age
        pace = self._pace_of(request)
        if pace is not None and pace not in self._lines:
            self._lines[pace] = _MostSince()

    def pass_step(self, age: int, last: int, now: int, joined: dict[Request, int]) -> None:
        """All members who joined before `age` have the token of that age now; the one before came at `last`."""
        self._greet(age, now, joined)
        oldest = next(iter(joined.values()), age)
        self._gaps.add(age, now - last, oldest)
        for pace, line in self._lines.items():
            line.add(age, now - age * pace, oldest)

    def begin_leap(self, started: int, durations: Iterable[int]) -> None:
        """`pass_leap` will be about steps in a row from `started` on."""
        self._ends = list(accumulate(durations, initial=started))[1:]

    def pass_leap(self, age: int, last: int, joined: dict[Request, int]) -> None:
        """As `pass_step` for each of those that `begin_leap` was given, with tokens from the age `age` on."""
        ends = self._ends
        self._greet(age, ends[0], joined)
        oldest, newest = next(iter(joined.values()), age), age + len(ends) - 1
        self._gaps.add(age, ends[0] - last, oldest)
        if newest > age:
            self._gaps.add(newest, max(end - start for start, end in pairwise(ends)), oldest)
        for pace, line in self._lines.items():
            late = [end - later for end, later in zip(ends, range(age * pace, (newest + 1) * pace, pace), strict=True)]
            line.add(newest, max(late), oldest)

    def leave(self, request: Request, joined: int, applied: int) -> None:
        """`request`, which joined at one age, leaves; tokens up to the age `applied` have come."""
        times = request.token_times
        assert times is not None
        times.longest_gap = max(times.longest_gap, self._gaps.since(joined + 1))
        if times.pace is not None:
            ahead = times.first_at + (times.num_tokens - joined - 1) * times.pace
            times.reader_wait = max(times.reader_wait, self._lines[times.pace].since(joined) - ahead)
        times.num_tokens += applied - joined

    def _greet(self, age: int, now: int, joined: dict[Request, int]) -> None:
        """The first gap within the cohort is each new member's own."""
        for request, start in list(self._fresh.items()):
            if joined.get(request) != start:
                del self._fresh[request]  # gone again
            elif start < age:
                del self._fresh[request]
                assert request.token_times is not None
                assert request.last_token_at is not None
                request.token_times.longest_gap = max(request.token_times.longest_gap, now - request.last_token_at)


class _MostSince:
    """The largest of the values entered at ages above a given one. Ages are entered in order."""

    def __init__(self) -> None:
        self._ages: list[int] = []
        self._values: list[int] = []  # falling: what a later one exceeds is never asked for again
        self._most_kept = _FEWEST_KEPT

    def add(self, age: int, value: int, oldest: int) -> None:
        """`oldest`: no age below is asked for any more."""
        ages, values = self._ages, self._values
        while values and values[-1] <= value:
            ages.pop()
            values.pop()
        ages.append(age)
        values.append(value)
        if len(ages) > self._most_kept:
            first = bisect_right(ages, oldest)
            del ages[:first], values[:first]
            self._most_kept = max(2 * len(ages), _FEWEST_KEPT)

    def since(self, age: int) -> int:
        """The largest entered at an age above `age`; a very small number if there is none."""
        place = bisect_right(self._ages, age)
        return self._values[place] if place < len(self._values) else _NONE
