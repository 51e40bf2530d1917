"""`TokenWatch`: longest inter-token gap and reader wait per request.

A reader starts at the first token and takes `pace` ticks per token. Token k (from 0) at time T_k is late by
T_k - T_0 - k pace; the reader's total wait is the maximum of these (as in playing a video).

In a `DecodeCohort` of age a at time T, a member is late by (T - a pace) plus a constant. The maximum since it joined is
looked up when it leaves, in a stack of falling values; a leap adds two entries. Without a watch steps cost nothing."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

from perfmodel.engine.request import Request, TokenTimes

_FEWEST_KEPT = 64
_NONE = -(2**62)


class TokenWatch:
    """Watches the requests of one engine. pace_of: reader's ticks per token; None: no reader."""

    def __init__(self, pace_of: Callable[[Request], int | None]) -> None:
        self._pace_of = pace_of
        self._gaps = _MostSince()
        self._lines: dict[int, _MostSince] = {}  # by pace
        self._ends: list[int] = []  # of the steps of a leap
        self._fresh: dict[Request, int] = {}  # members without a cohort token yet -> age when they joined

    def take(self, request: Request, now: int) -> None:
        """Record tokens at `now` of `request`, outside the cohort; `last_token_at`: the previous ones."""
        times = request.token_times
        if times is None:
            request.token_times = times = TokenTimes(now, self._pace_of(request))
        elif request.last_token_at is not None:
            times.longest_gap = max(times.longest_gap, now - request.last_token_at)
        if times.pace is not None:
            times.reader_wait = max(times.reader_wait, now - times.first_at - times.num_tokens * times.pace)
        times.num_tokens = request.num_output_tokens

    def join(self, request: Request, age: int) -> None:
        """`request` joins the cohort at `age`."""
        self._fresh[request] = age
        pace = self._pace_of(request)
        if pace is not None and pace not in self._lines:
            self._lines[pace] = _MostSince()

    def pass_step(self, age: int, last: int, now: int, joined: dict[Request, int]) -> None:
        """Members who `joined` before `age` get their token at `now`; the previous one came at `last`."""
        self._greet(age, now, joined)
        oldest = next(iter(joined.values()), age)
        self._gaps.add(age, now - last, oldest)
        for pace, line in self._lines.items():
            line.add(age, now - age * pace, oldest)

    def begin_leap(self, started: int, durations: Iterable[int]) -> None:
        """Prepare `pass_leap` for consecutive steps from `started` on."""
        self._ends = list(accumulate(durations, initial=started))[1:]

    def pass_leap(self, age: int, last: int, joined: dict[Request, int]) -> None:
        """As `pass_step` for each step of `begin_leap`, from `age` on; `last`, `joined`: see there."""
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
        """`request` leaves; it joined at age `joined`, and tokens up to age `applied` have come."""
        times = request.token_times
        assert times is not None
        times.longest_gap = max(times.longest_gap, self._gaps.since(joined + 1))
        if times.pace is not None:
            ahead = times.first_at + (times.num_tokens - joined - 1) * times.pace
            times.reader_wait = max(times.reader_wait, self._lines[times.pace].since(joined) - ahead)
        times.num_tokens += applied - joined

    def _greet(self, age: int, now: int, joined: dict[Request, int]) -> None:
        """Record each new member's first gap within the cohort."""
        for request, start in list(self._fresh.items()):
            if joined.get(request) != start:
                del self._fresh[request]  # gone again
            elif start < age:
                del self._fresh[request]
                assert request.token_times is not None
                assert request.last_token_at is not None
                request.token_times.longest_gap = max(request.token_times.longest_gap, now - request.last_token_at)


class _MostSince:
    """Maximum of values entered at ages above a given one, in order of age."""

    def __init__(self) -> None:
        self._ages: list[int] = []
        self._values: list[int] = []  # falling: later larger values hide earlier ones
        self._most_kept = _FEWEST_KEPT

    def add(self, age: int, value: int, oldest: int) -> None:
        """Enter `value`; no age below `oldest` will be queried."""
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
        """Maximum above `age`; a very small number if none."""
        place = bisect_right(self._ages, age)
        return self._values[place] if place < len(self._values) else _NONE
