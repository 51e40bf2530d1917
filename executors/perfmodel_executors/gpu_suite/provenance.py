"""Where measurements come from: versions, driver and commit."""

__all__ = ["COMMIT", "commit", "versions"]

import os
import platform
import subprocess
from functools import lru_cache
from pathlib import Path

import torch

COMMIT = "PERFMODEL_COMMIT"  # the environment variable that names the commit of a copy without .git
_ROOT = Path(__file__).resolve().parents[3]


def versions(is_gpu: bool) -> dict[str, str]:
    """Versions of Python and torch; on a GPU of Triton, CUDA and the driver, too."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if is_gpu:
        import triton

        found |= {"triton": triton.__version__, "cuda": str(torch.version.cuda), "driver": _driver()}
    return found


@lru_cache
def commit() -> str:
    """What `PERFMODEL_COMMIT` says, else the commit of the checkout that this runs from; empty where neither does."""
    if COMMIT in os.environ or not (_ROOT / ".git").exists():
        return os.environ.get(COMMIT, "")
    return _first_line(["git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD"])


@lru_cache
def _driver() -> str:
    """As the management library says; empty where it is not there."""
    return _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])


def _first_line(command: list[str]) -> str:
    try:
        found = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True, timeout=10
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ""
    return found[0].strip() if found else ""
