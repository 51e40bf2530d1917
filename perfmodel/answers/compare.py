"""What differs between two results, or between two scenarios simulated now: `perfmodel compare`."""

__all__ = ["answer_compare", "answer_results"]

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.answers.answer import Answer, Watch, unwatched
from perfmodel.answers.asked import load


def answer_compare(one: str, other: str, progress: Watch = unwatched) -> Answer:
    """What differs; `result` is the ResultComparison.

    one, other: files that a command wrote with `--json` (by their suffix), or scenarios, which are simulated

    Raises SpecError for what cannot be read, and for results of two kinds.
    """
    return answer_results(_result(one, progress), _result(other, progress), one, other)


def answer_results(one: Mapping[str, Any], other: Mapping[str, Any], name: str, other_name: str) -> Answer:
    """See `answer_compare`: of two results as `--json` prints them, and what they are called."""
    from perfmodel.planning.comparison import compare_results
    from perfmodel.report.views.catalog import comparison_view

    found = compare_results(one, other, name, other_name)
    return Answer(found.to_json, lambda: comparison_view(found), found)


def _result(name: str, watch: Watch) -> dict[str, Any]:
    """The result in a file, or of a scenario that is simulated now."""
    if name.endswith(".json"):
        from perfmodel.planning.comparison import read_result

        return read_result(Path(name))
    from perfmodel.answers.run import simulated

    scenario = load(name, None)
    with watch("simulating") as progress:
        return simulated(scenario, (), progress).to_json()
