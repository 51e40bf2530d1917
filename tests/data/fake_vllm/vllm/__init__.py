"""A stand-in for vLLM with the names that `vllm_process.py` uses: a scheduler of ten lines, no model."""

import os

if os.environ.get("FAKE_VLLM") == "broken":
    raise ImportError("libcudart.so.12: cannot open shared object file")

__version__ = "0.30.0+fake"
