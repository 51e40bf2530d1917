"""`llama-bench -o json|jsonl|csv`: a row for each test, prompts of n_prompt tokens or n_gen generated ones.

`avg_ts` is tokens per second, the mean over the repetitions. The device is `gpu_info` (`cpu_info` where layers run on
the processor), the GGUF type and the model's name are in `model_type` ("llama 8B Q4_K - Medium"); a file's name says
them better where it follows the usual form (Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf).

Fields: ggml-org/llama.cpp, tools/llama-bench/llama-bench.cpp.
"""

__all__ = ["is_llama_bench_row", "read_llama_bench_row"]

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from perfmodel.calibrate.bench.runs import MOST_TOKENS, BenchLoad, BenchRun, Said, figure, text_of
from perfmodel.calibrate.local.rows import LocalRow
from perfmodel.errors import SpecError

_FILE_TYPE = re.compile(r"[-._](i?q\d\w*|bf16|f16|f32|mxfp4)(?=\.gguf$|-\d{5}-of-\d{5}\.gguf$)", re.IGNORECASE)
_TYPE = re.compile(r"\b(I?Q\d_\w+|Q\d_K(?: - (?:Small|Medium|Large))?|BF16|F16|F32|MXFP4)", re.IGNORECASE)
_SIZES = {" - small": "_s", " - medium": "_m", " - large": "_l"}
_PARTS = re.compile(r"-\d{5}-of-\d{5}$")
_BACKENDS = {
    "cuda": "cuda",
    "rocm": "rocm",
    "hip": "rocm",
    "vulkan": "vulkan",
    "metal": "metal",
    "mtl": "metal",
    "opencl": "opencl",
    "sycl": "sycl",
    "blas": "cpu",
    "cpu": "cpu",
}
_TOOL = "llama-bench"
_AUTO = "-1"  # of flash_attn: as the backend has it
_MOST_PARAMETERS = 1e14


def is_llama_bench_row(data: Mapping[str, Any]) -> bool:
    """Whether it is such a row."""
    return {"n_prompt", "n_gen", "avg_ts", "model_type"} <= set(data)


def read_llama_bench_row(name: str, data: Mapping[str, Any]) -> BenchRun:
    """The test that `data` is of, called `name`; values may be text, as CSV has them.

    Raises SpecError for what cannot be compared.
    """
    prompt, generated = (int(figure(name, data, key) or 0) for key in ("n_prompt", "n_gen"))
    rate = figure(name, data, "avg_ts")
    if bool(prompt) == bool(generated):
        raise SpecError(f"{name}: found n_prompt {prompt} and n_gen {generated}, compared are tests of one of the two.")
    for key in ("n_prompt", "n_gen", "n_depth", "n_ubatch"):
        if (figure(name, data, key) or 0) > MOST_TOKENS:
            raise SpecError(f"{name}: {key}: found {str(data[key])[:40]!r}, allowed up to {MOST_TOKENS:g} tokens.")
    if (figure(name, data, "model_n_params") or 0) > _MOST_PARAMETERS:
        raise SpecError(
            f"{name}: model_n_params: found {str(data['model_n_params'])[:40]!r}, allowed up to {_MOST_PARAMETERS:g}."
        )
    if not rate:
        raise SpecError(f"{name}: has no tokens per second (avg_ts); there is nothing to compare.")
    row = _row(name, data, prompt, generated, rate)
    metric = "prompt_tokens_per_s" if prompt else "decode_tokens_per_s"
    says: dict[str, Said] = {"model": row.model, "hardware": row.device, "engine.profile": "llamacpp"}
    return BenchRun(
        name=name,
        tool=_TOOL,
        version=row.build,
        says=says,
        load=BenchLoad("closed", 1, 1, prompt=prompt or None, answer=generated or None),
        measured={metric: rate},
        completed=1,
        failed=0,
        notes=_notes(name, data, row),
        row=row,
    )


def _notes(name: str, data: Mapping[str, Any], row: LocalRow) -> tuple[str, ...]:
    threads = figure(name, data, "n_threads")
    if row.backend != "cpu" or not threads:
        return ()
    return (f"ran with {threads:.0f} threads; predicted is the processor with all of its cores",)


def _row(name: str, data: Mapping[str, Any], prompt: int, generated: int, rate: float) -> LocalRow:
    backend = _backend(text_of(name, data, "backends"), data.get("n_gpu_layers"))
    is_cpu = backend == "cpu"
    device = text_of(name, data, "cpu_info" if is_cpu else "gpu_info")
    devices = [each.strip() for each in device.split(",") if each.strip()]
    if not devices:
        raise SpecError(f"{name}: names no device in gpu_info or cpu_info; give --hardware.")
    flash = None if str(data.get("flash_attn")) in ("None", _AUTO) else data.get("flash_attn")
    build = figure(name, data, "build_number")
    return LocalRow(
        row_id=name,
        source=_TOOL,
        device=devices[0],
        device_class="cpu" if is_cpu else "gpu",
        num_devices=len(devices),
        tool=_TOOL,
        backend=backend,
        backend_detail="",
        build=f"b{build:.0f}" if build else "",
        date=None,
        model=_model(name, data),
        params=figure(name, data, "model_n_params") or 0.0,
        active_params=0.0,
        gguf_type=_gguf_type(name, data),
        file_size_bytes=figure(name, data, "model_size") or 0.0,
        flash=None if flash is None else str(flash).lower() in ("1", "true"),
        kv_type=text_of(name, data, "type_k"),
        test="pp" if prompt else "tg",
        num_prompt=prompt,
        num_generated=generated,
        depth=int(figure(name, data, "n_depth") or 0),
        batch=1,
        ubatch=int(figure(name, data, "n_ubatch") or 0),
        tokens_per_s=rate,
        flags="",
        group=name,
    )


def _backend(text: str, gpu_layers: Any) -> str:
    """The first of "CUDA,CPU" that runs layers; gpu_layers: how many of them, -1 for all that fit."""
    lower = text.lower()
    found = next((ours for theirs, ours in _BACKENDS.items() if theirs in lower), "cpu")
    return "cpu" if str(gpu_layers) == "0" else found


def _stem(name: str, data: Mapping[str, Any]) -> str:
    return PurePosixPath(text_of(name, data, "model_filename").replace("\\", "/")).name


def _model(name: str, data: Mapping[str, Any]) -> str:
    stem = _FILE_TYPE.sub("", _stem(name, data)).removesuffix(".gguf")
    return _PARTS.sub("", stem) or _TYPE.sub("", text_of(name, data, "model_type")).strip()


def _gguf_type(name: str, data: Mapping[str, Any]) -> str:
    found = _FILE_TYPE.search(_stem(name, data))
    if found is not None:
        return found[1].lower()
    stated = _TYPE.search(text_of(name, data, "model_type"))
    if stated is None:
        raise SpecError(f"{name}: neither model_filename nor model_type names the type of the weights (Q4_K_M, F16).")
    lower = stated[1].lower()
    for words, short in _SIZES.items():
        lower = lower.replace(words, short)
    return lower
