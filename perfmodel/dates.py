"""What day it is: today, or that of SOURCE_DATE_EPOCH, by which equal inputs give equal files on any day.

Source: https://reproducible-builds.org/specs/source-date-epoch/"""

import datetime
import os

from perfmodel.errors import SpecError

_VARIABLE = "SOURCE_DATE_EPOCH"


def today() -> datetime.date:
    """The date in UTC. Raises SpecError where SOURCE_DATE_EPOCH is no number of seconds since 1970."""
    given = os.environ.get(_VARIABLE)
    if not given:
        return datetime.datetime.now(datetime.UTC).date()
    try:
        return datetime.datetime.fromtimestamp(int(given), datetime.UTC).date()
    except (ValueError, OverflowError, OSError):
        raise SpecError(f"{_VARIABLE}={given}: expected a number of seconds since 1970, or nothing.") from None
