"""The machine that is measured: versions, driver and commit; a GPU's clocks, power and temperature meanwhile. A GPU's
are as `nvidia-smi` says; the settings are only read."""

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

COMMIT = "PERFMODEL_COMMIT"  # the environment variable that names the commit of a copy without .git
_ROOT = Path(__file__).resolve().parents[3]

# Our name -> the query's. Units are the query's own: MHz, W, degrees Celsius.
FIELDS: Mapping[str, str] = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
_EVERY_S = 5.0
_MAX_ROWS = 2000
_LIMIT_S = 10.0  # of one call


class DeviceReader:
    """Reads the device while it is open, continuing an earlier run's `known`; query: a query of nvidia-smi to its
    answer."""

    def __init__(
        self,
        is_gpu: bool,
        known: Mapping[str, Any] | None = None,
        query: Callable[[str], str] | None = None,
        every_s: float = _EVERY_S,
    ) -> None:
        known = known or {}
        self._columns: dict[str, list[float]] = {name: list(known.get(name, ())) for name in ("at_s", *FIELDS)}
        self._start = time.monotonic() - max(self._columns["at_s"], default=0.0)
        self._absent: dict[str, str] = {} if is_gpu else dict.fromkeys(FIELDS, "not read on a CPU")
        self._query, self._every_s = query or _nvidia_smi, every_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if is_gpu:
            self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(_LIMIT_S)

    def as_json(self) -> dict[str, Any]:
        """Columns of readings, and `absent`: why a field has none."""
        columns = {name: list(values) for name, values in self._columns.items() if values}
        return {**columns, "absent": self._absent}

    def _supported(self) -> list[str]:
        names = []
        for name, query in FIELDS.items():
            try:
                answer = self._query(query)
            except subprocess.CalledProcessError as error:
                lines = f"{error.stdout or ''}{error.stderr or ''}".strip().splitlines()
                self._absent[name] = f"nvidia-smi says nothing: {lines[0] if lines else f'status {error.returncode}'}"
            except (OSError, subprocess.SubprocessError) as error:  # the next answer would be no other
                self._absent = dict.fromkeys(FIELDS, f"nvidia-smi says nothing: {error}")
                return []
            else:
                if _number(answer) is None:
                    self._absent[name] = f"nvidia-smi says {answer.strip()!r}"
                else:
                    names.append(name)
        return names

    def _read(self) -> None:
        names = self._supported()
        query = ",".join(FIELDS[name] for name in names)
        while names and not self._is_closed.wait(self._every_s) and len(self._columns["at_s"]) < _MAX_ROWS:
            try:
                values = [_number(part) for part in self._query(query).split(",")]
            except (OSError, subprocess.SubprocessError):
                continue
            if len(values) == len(names) and None not in values:
                self._columns["at_s"].append(round(time.monotonic() - self._start, 1))
                for name, value in zip(names, values, strict=True):
                    self._columns[name].append(value or 0.0)


def _nvidia_smi(query: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise FileNotFoundError("there is no nvidia-smi here")
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = [program, f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", device]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=_LIMIT_S).stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def versions(is_gpu: bool) -> dict[str, str]:
    known = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if is_gpu:
        import triton

        driver = _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        known |= {"triton": triton.__version__, "cuda": str(torch.version.cuda), "driver": driver}
    return known


def commit() -> str:
    """What `PERFMODEL_COMMIT` says, else the commit of the checkout that this runs from; empty where neither does."""
    if COMMIT in os.environ or not (_ROOT / ".git").exists():
        return os.environ.get(COMMIT, "")
    return _first_line("git", "-C", str(_ROOT), "rev-parse", "--short", "HEAD")


@lru_cache
def _first_line(*command: str) -> str:
    try:
        text = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=_LIMIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return text.split("\n", 1)[0].strip()
