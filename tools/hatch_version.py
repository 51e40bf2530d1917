"""The version of what is built: hatchling evaluates `VERSION` (`pyproject.toml`), setuptools-scm reads the history.

    a commit tagged v0.2.0                            0.2.0
    any other, where perfmodel/version.py says 0.2.0  0.2.0.dev7+g1a2b3c4, 7 commits after the last tag
    with changes that are not committed               0.2.0.dev7+g1a2b3c4.changed
    a source distribution                             as it was built
    a `git archive` (.git_archival.txt)               as its commit; without any tag 0.2.0.dev0+g1a2b3c4
    a folder without .git                             0.2.0

Where the statement was not raised after a release, commits lead to the next patch. A tag decides, whatever is stated.
"""

__all__ = ["VERSION"]

import runpy
from pathlib import Path

from packaging.version import Version
from setuptools_scm import get_version
from setuptools_scm.version import ScmVersion, guess_next_version

_ROOT = Path(__file__).resolve().parents[1]
_STATED: str = runpy.run_path(str(_ROOT / "perfmodel" / "version.py"))["_STATED"]
_NOTHING = "0.0"  # found where there is no tag, or no history


def _is_release(found: ScmVersion) -> bool:
    return found.exact and str(found.tag) != _NOTHING


def _public(found: ScmVersion) -> str:
    if _is_release(found):
        return found.format_with("{tag}")
    if str(found.tag) != _NOTHING and Version(str(found.tag)) >= Version(_STATED):
        return found.format_next_version(guess_next_version, "{guessed}.dev{distance}")
    return found.format_with("{stated}.dev{distance}", stated=_STATED)


def _local(found: ScmVersion) -> str:
    """Without the day that setuptools-scm would write: equal trees are equal builds."""
    if _is_release(found) or found.node is None:
        return ""
    node = found.format_with("{node}").removeprefix("g")
    return f"+g{node}.changed" if found.dirty else f"+g{node}"


_found = get_version(root=str(_ROOT), version_scheme=_public, local_scheme=_local, fallback_version=_NOTHING)
VERSION = _STATED if _found == _NOTHING else _found
