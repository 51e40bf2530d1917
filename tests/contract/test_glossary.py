"""Names are those of the field: words that only this project's authors would search for are no identifiers.

`CONTRIBUTING.md` has the rule; the words on the left were names here, those on the right are what they became.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

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
    "beside_bytes": "workspace_bytes",
    "without_files": "restrict_paths",
    "touchable": "allow_path",
    "may_touch": "is_allowed",
    "write_wholes": "atomic_write_all",
    "write_whole": "atomic_write",
    "read_bounded": "read_limited",
    "read_bounded_text": "read_limited_text",
    "_way_in": "_entry_router",
    "run_dry": "run_until_idle",
    "look_again": "reschedule",
    "Wanted": "GenerationLimits",
    "most_unless_asked": "default_max_tokens",
    "is_asked_for": "on_demand",
    "Tell": "OnPreliminary",
    "over_cores": "parallel_map",
    "Said": "Stated",
    "SetupFact": "ConfigFact",
    "most_slots": "max_batch",
    "_own_calibration": "_user_calibration",
    "Printable": "Renderable",
    "_SURELY_DEEP": "_SAFE_DEPTH",
    "foresee": "plan_leap",
    "knows": "has_family",
}
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("perfmodel", "executors/perfmodel_executors")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Every identifier, those within f-strings included."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def messages_in(tree: ast.AST) -> Iterator[str]:
    """String constants but docstrings and patterns of prose: what is raised, or given on as a sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise | ast.Yield | ast.Assign | ast.Return | ast.Tuple):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_no_identifier_is_of_the_private_dialect() -> None:
    old = {*VARIABLES, *GLOSSARY}
    for path, tree in TREES.items():
        names = set(names_in(tree))
        assert not names & old, path
        assert not [name for name in names if re.match(r"_?(MOST|LEAST)_[A-Z]", name)], f"{path}: MAX_, MIN_"


def test_what_the_old_names_became_is_there() -> None:
    names = {name for tree in TREES.values() for name in names_in(tree)}
    assert set(GLOSSARY.values()) - names == set()


def test_messages_say_what_they_got_and_what_they_expected() -> None:
    old = re.compile(r"(^|: )found |, allowed |: allowed [a-z0-9]|(^|; )got no [a-z`*]")
    for path, tree in TREES.items():
        assert not [text for text in messages_in(tree) if old.search(text)], path
