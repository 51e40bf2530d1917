"""Kernels in Triton's interpreter, on a CPU: `make test` runs this folder in a process of its own.

The interpreter is chosen when triton is first imported (TRITON_INTERPRET=1), for the whole process; kernels compiled
ahead of time (tests/compiled) cannot share it. Without the variable, this folder is not collected.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if not collect_ignore_glob:
    import torch

    torch.set_num_threads(1)
