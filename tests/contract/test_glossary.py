"""Names are those of the field: words that only this project's authors would search for are no identifiers.

`CONTRIBUTING.md` has the rule; the words on the left were names here, those on the right are what they became.
"""

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Variables get the noun of the thing: `row`, `match`, `own_blocks`.
VARIABLES = ("each", "found", "mine", "said", "told", "whose")
GLOSSARY = {
    "StepPricer": "StepCostModel",
    "GraphPricer": "GraphCostModel",
    "SpeculativePricer": "SpeculativeCostModel",
    "StagedPricer": "StagedCostModel",
    "SplitPricer": "SplitCostModel",
    "pricer": "cost_model",
    "_pricer": "_cost_model",
    "FORMS": "KERNEL_MODELS",
    "Extent": "ProblemSize",
    "HeadsExtent": "HeadShape",
    "GemmExtent": "GemmSize",
    "PrefillExtent": "PrefillSize",
    "DecodeExtent": "DecodeSize",
    "ExpertsExtent": "ExpertsSize",
    "extent": "problem",
    "extent_as": "problem_as",
    "settle": "finalize",
    "of_one_more": "widen_for_new_group",
    "cell_of": "config_key",
    "_relations": "_transfer_candidates",
    "_nearness": "_transfer_distance",
    "_stood_in_for": "_proxy_for",
    "beside_bytes": "workspace_bytes",
    "without_files": "restrict_paths",
    "touchable": "allow_path",
    "may_touch": "is_allowed",
    "write_wholes": "atomic_write_all",
    "write_whole": "atomic_write",
    "read_bounded": "read_limited",
    "read_bounded_text": "read_limited_text",
    "_past_the_door": "reject_oversized",
    "_way_in": "entry_router",
    "_Refusal": "RejectingServer",
    "run_dry": "run_until_idle",
    "look_again": "reschedule",
    "Wanted": "GenerationLimits",
    "most_unless_asked": "default_max_tokens",
    "is_asked_for": "on_demand",
    "Tell": "OnPreliminary",
    "over_cores": "parallel_map",
    "Said": "ConfigValue",
    "SetupFact": "ConfigFact",
    "most_slots": "max_batch",
    "_own_calibration": "_user_calibration",
    "Printable": "Renderable",
    "_Home": "BlockProvider",
    "_HOMES": "_BLOCK_PROVIDERS",
    "word_when_long": "delayed_status",
    "_SURELY_DEEP": "_SAFE_DEPTH",
    "foresee": "plan_leap",
    "knows": "has_family",
}
# (file, word) -> why it stays: a key of a file format, or the word in another sense.
EXCEPTIONS: dict[tuple[str, str], str] = {}
SOURCES = [
    path for folder in ("perfmodel", "executors/perfmodel_executors") for path in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("folder", ["perfmodel", "executors/perfmodel_executors"])
def test_no_identifier_is_of_the_private_dialect(folder: str) -> None:
    words = {*VARIABLES, *GLOSSARY}
    left = set()
    for path in (ROOT / folder).rglob("*.py"):
        with tokenize.open(path) as source:
            names = {token.string for token in tokenize.generate_tokens(source.readline) if token.type == tokenize.NAME}
        odd = {name for name in names if name in words or re.match(r"_?(MOST|LEAST)_[A-Z]", name)}  # MAX_, MIN_
        left |= {(path.relative_to(ROOT).as_posix(), word) for word in odd}
    assert left - EXCEPTIONS.keys() == set()


def test_every_exception_is_still_needed() -> None:
    for file, word in EXCEPTIONS:
        assert re.search(rf"\b{word}\b", (ROOT / file).read_text(encoding="utf-8")), (file, word)


def test_messages_say_what_they_got_and_what_they_expected() -> None:
    old = re.compile(r"\bfound [^\"]{0,80}, allowed\b")
    for path in SOURCES:
        assert not old.search(path.read_text(encoding="utf-8")), path
