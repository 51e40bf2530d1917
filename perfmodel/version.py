"""The version of perfmodel: the release that results, stores and reports carry, and which build of it this is.

A checkout is the release stated here, whatever its commit, so that commits which change no prediction change no
result. A wheel is what it was built as, which pip has written beside the package: the version of a tag, or, of a commit
that has none, that of the release to come with `.devN+gCOMMIT` behind (`tools/hatch_version.py`)."""

from pathlib import Path

_STATED = "0.1.0"  # the release that this tree is or will be; what is built without tags and without .git is called so


def _built() -> str:
    """The version in the name of the one `perfmodel-VERSION.dist-info` beside the package; else the stated one.

    Read from the name, since `importlib.metadata` would take longer than all else that `perfmodel --version` loads."""
    infos = [path.name for path in Path(__file__).resolve().parents[1].glob("perfmodel-*.dist-info")]
    return infos[0].removeprefix("perfmodel-").removesuffix(".dist-info") if len(infos) == 1 else _STATED


__version__ = _built()
RELEASE = __version__.partition("+")[0].partition(".dev")[0]
