"""Kernels compiled ahead of time for GPUs that are not here. Triton's interpreter cannot share the process.

Compiling takes minutes. `make test` compiles a third of each test's cases, so chosen that all operators and all devices
are among them; with ALL_BINARIES=1, as `make compiled-36` and `make compiled-37` set it, all are compiled.
"""

import os
from itertools import groupby
from pathlib import Path

HERE = Path(__file__).parent
_FEW = 6  # cases that are not worth a choice

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []


def pytest_collection_modifyitems(config, items):
    """Leave out two thirds of the cases, another device's of each operator."""
    if os.environ.get("ALL_BINARIES") == "1":
        return
    here = [item for item in items if item.path.is_relative_to(HERE)]
    left_out = set()
    for _, cases in groupby(here, key=lambda item: (item.path, item.originalname)):
        numbered = list(enumerate(cases))
        if len(numbered) >= _FEW:
            left_out |= {item.nodeid for number, item in numbered if (number + number // 3) % 3}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]
