"""Work for jobs' processes: what a question's first value says happens."""

import os
import time

from perfmodel.errors import SpecError
from perfmodel.web.results import QueryResult


def work(question, console):
    """Counts, hangs, refuses, breaks or ends its process."""
    kind, *more = question.scenario.split(":")
    match kind:
        case "steps":
            with console.watch("counting") as tell:
                for done in range(int(more[0])):
                    tell(done, int(more[0]))
                    time.sleep(0.01)
        case "hang":
            time.sleep(60)
        case "refuse":
            raise SpecError("refuse: got 1; expected 2.")
        case "break":
            raise ValueError("secret")
        case "memory":
            raise MemoryError
        case "end":
            os._exit(3)
    return QueryResult(question, {"name": question.scenario, "process": os.getpid()}, {"blocks": []})
