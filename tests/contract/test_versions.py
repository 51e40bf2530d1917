"""What a build is called: by its tag, else by the version that perfmodel/version.py states and by its commit."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import perfmodel
from perfmodel.version import RELEASE, __version__

ROOT = Path(__file__).resolve().parents[2]
STATED = "0.2.0"
PARTS = ("tools/hatch_version.py", ".git_archival.txt", ".gitattributes", "pyproject.toml", "tools/hatch_build.py")
NOBODY = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    **{f"GIT_{role}_{part}": "nobody@example.org" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")},
}

pytest.importorskip("setuptools_scm", reason="builds need it: the extra `test`")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def call(*words, cwd):
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SETUPTOOLS_SCM", "GIT_"))} | NOBODY
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def version_of(folder):
    return call(sys.executable, "-m", "hatchling", "version", cwd=folder).split()[-1]


@pytest.fixture
def tree(tmp_path):
    """What a version is found from, and no more, in a folder of its own that no history knows."""
    folder = tmp_path / "tree"
    (folder / "perfmodel").mkdir(parents=True)
    (folder / "tools").mkdir()
    for name in PARTS:
        shutil.copy(ROOT / name, folder / name)
    text = (ROOT / "perfmodel" / "version.py").read_text(encoding="utf-8")
    (folder / "perfmodel" / "version.py").write_text(text.replace(f'"{RELEASE}"', f'"{STATED}"'), encoding="utf-8")
    return folder


@pytest.fixture
def repository(tree):
    call("git", "init", "--quiet", cwd=tree)
    commit(tree)
    return tree


def commit(tree):
    (tree / "changed.txt").write_text(str(len(call("git", "log", "--all", "--oneline", cwd=tree))), encoding="utf-8")
    call("git", "add", "--all", cwd=tree)
    call("git", "commit", "--quiet", "--message", "a change", cwd=tree)
    return call("git", "rev-parse", "HEAD", cwd=tree)[:7]


def archive(tree, folder):
    """As a code host offers it for download."""
    folder.mkdir()
    call("git", "archive", "--output", str(folder / "tree.tar"), "HEAD", cwd=tree)
    shutil.unpack_archive(folder / "tree.tar", folder, filter="data")
    return folder


def test_a_folder_without_history_is_what_it_states(tree):
    assert version_of(tree) == STATED


@needs_git
def test_a_folder_within_another_history_is_what_it_states(repository):
    """As a copy in build/ of a checkout is, or a project that carries this one along."""
    inner = repository / "inner"
    (inner / "perfmodel").mkdir(parents=True)
    (inner / "tools").mkdir()
    for name in PARTS:
        shutil.copy(repository / name, inner / name)
    shutil.copy(repository / "perfmodel" / "version.py", inner / "perfmodel" / "version.py")
    assert version_of(inner) == STATED


@needs_git
def test_a_tag_is_the_version_and_commits_go_on_from_it(repository, tmp_path):
    first = commit(repository)
    assert version_of(repository).startswith(f"{STATED}.dev2+g{first}")
    call("git", "tag", "v0.1.7", cwd=repository)
    assert version_of(repository) == "0.1.7"
    second = commit(repository)
    assert version_of(repository).startswith(f"{STATED}.dev1+g{second}")
    call("git", "tag", f"v{STATED}", cwd=repository)
    assert version_of(repository) == STATED
    assert version_of(archive(repository, tmp_path / "tagged")) == STATED
    third = commit(repository)  # and nobody has raised the statement
    assert version_of(repository).startswith(f"0.2.1.dev1+g{third}")
    assert version_of(archive(repository, tmp_path / "later")).startswith(f"0.2.1.dev1+g{third}")
    (repository / "changed.txt").write_text("not committed", encoding="utf-8")
    assert version_of(repository).endswith(".changed")


@needs_git
def test_an_archive_without_tags_knows_its_commit(repository, tmp_path):
    found = call("git", "rev-parse", "HEAD", cwd=repository)[:7]
    assert version_of(archive(repository, tmp_path / "archive")).startswith(f"{STATED}.dev0+g{found}")


def test_a_checkout_says_the_release_whatever_its_commit():
    """So results, stores and reports do not change with a commit that changes no prediction."""
    if not list(ROOT.glob("perfmodel-*.dist-info")):
        assert __version__ == RELEASE
    assert perfmodel.__version__ == __version__


@pytest.mark.parametrize(
    ("names", "wanted", "release"),
    [
        ((), "0.1.0", "0.1.0"),
        (("perfmodel-0.3.0.dist-info", "perfmodel_other-1.dist-info"), "0.3.0", "0.3.0"),
        (("perfmodel-0.3.0.dev4+g1a2b3c4.dist-info",), "0.3.0.dev4+g1a2b3c4", "0.3.0"),
        (("perfmodel-0.3.0rc1.dist-info",), "0.3.0rc1", "0.3.0rc1"),
        (("perfmodel-0.3.0.dist-info", "perfmodel-0.2.0.dist-info"), "0.1.0", "0.1.0"),  # a broken installation
    ],
)
def test_an_installed_wheel_says_what_it_was_built_as(tmp_path, names, wanted, release):
    (tmp_path / "perfmodel").mkdir()
    text = (ROOT / "perfmodel" / "version.py").read_text(encoding="utf-8").replace(f'"{RELEASE}"', '"0.1.0"')
    (tmp_path / "perfmodel" / "version.py").write_text(text, encoding="utf-8")
    for name in names:
        (tmp_path / name).mkdir()
    code = "import runpy; v = runpy.run_path('perfmodel/version.py'); print(v['__version__'], v['RELEASE'])"
    assert call(sys.executable, "-c", code, cwd=tmp_path).split() == [wanted, release]


def test_the_citation_has_the_shape_of_its_format_and_this_version():
    """Citation File Format 1.2.0 requires four keys, and of each author the name of a person or an entity."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {"abstract", "authors", "cff-version", "keywords", "license", "message", "title", "type", "version"}
    assert {"authors", "cff-version", "message", "title"} <= set(cited) <= known
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] in ("software", "dataset")
    assert cited["version"] == RELEASE
    assert [each["name"] for each in cited["authors"]] == [each["name"] for each in project["authors"]]
    assert len(set(cited["keywords"])) == len(cited["keywords"])
    assert cited["license"] in project["license"].split(" AND ")


def test_the_changelog_has_the_release_that_is_stated():
    assert f"\n## {RELEASE}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
