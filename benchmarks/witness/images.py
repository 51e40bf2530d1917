"""CPU seconds that vLLM's API server takes for images, at the real server on this CPU.

    python benchmarks/witness/images.py OUT.json [--build FOLDER]

The model is a Qwen2-VL as small as can be, whose processor normalises on the CPU. Requests bring JPEG files of random
colors, none twice, and then once more the same ones, which the processor's cache has. What is left beside a request of
text, decoding and processing, whose lines `benchmarks/host_images.py` measures, is the server's own work; it is fitted
to the smaller requests. Runs with the environment's own interpreter, into which torchvision has to be installed. Five
minutes; needs Linux.
"""

__all__ = ["main"]

import argparse
import base64
import http.client
import json
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
from environments import NEWEST
from front_end import cpu_seconds
from surface import running, vllm_command
from surface_model import write_model

_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT / "benchmarks"))
from host_images import jpeg, non_negative  # noqa: E402

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_FIRST = 4096  # number of the first of them
_TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endfor %}<|assistant|>"
)
_SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
_CONFIG: dict[str, Any] = {
    **{"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vocab_size": 4104},
    **{"intermediate_size": 64, "max_position_embeddings": 16384, "tie_word_embeddings": True, "head_dim": 32},
    **{"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "torch_dtype": "bfloat16"},
    **{"vision_start_token_id": 4096, "vision_end_token_id": 4097, "image_token_id": 4098, "video_token_id": 4099},
}
_ENCODER = {"depth": 1, "embed_dim": 32, "mlp_ratio": 1, "num_heads": 1, "hidden_size": 64, "patch_size": 14}
_PROCESSOR: dict[str, Any] = {
    **{"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"},
    **{"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    **{"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]},
}
_FLAGS = ("--served-model-name", "m", "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager")
_LIMITS = ("--max-model-len", "8192", "--max-num-batched-tokens", "8192", "--no-mm-device-do-normalize")
_CLIENTS = 4
# (images of a request, pixels of a side, is smooth, requests)
_ROWS = (
    *((0, 32, True, 300), (1, 320, True, 150), (1, 640, True, 80), (1, 640, False, 80), (4, 320, True, 60)),
    *((4, 640, True, 30), (1, 1280, True, 30)),
)
_FITTED = 640**2  # pixels of a request at most: the memory of more is returned to the system and touched anew


def main() -> None:
    """Start, ask, read, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--build", type=Path, default=_ROOT / "build" / "witness", help="where environments are")
    asked = parser.parse_args()
    model = _write_vision_model(_ROOT / "build" / "images")
    words = [*vllm_command(NEWEST["vllm"], asked.build), "serve", str(model), *_FLAGS, *_LIMITS]
    rows = []
    with running(None, ["nice", "-n", "19", *words, "--host", "127.0.0.1"]) as url:
        _ask(url, [_body(1_000_000 + number, 1, 320, is_smooth=True) for number in range(8)])  # warms up
        for place, (count, side, is_smooth, num_requests) in enumerate(_ROWS):
            first = 10_000 * place
            bodies = [_body(first + 10 * number, count, side, is_smooth=is_smooth) for number in range(num_requests)]
            file = len(jpeg(side, side, is_smooth=is_smooth, seed=first))
            for is_cached in (False, True) if count else (False,):
                row = {"images": count, "side": side, "file_bytes": file, "is_cached": is_cached}
                rows.append(row | {"cpu_ms_per_request": _measured(url, bodies)})
                print(json.dumps(rows[-1]), flush=True)
    document = {"engine": "vllm", "version": NEWEST["vllm"], "rows": rows, "fit_ms": _fitted(rows)}
    print(json.dumps(document["fit_ms"]))
    asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _write_vision_model(folder: Path) -> Path:
    write_model(folder, **_SHAPE)
    place = folder / "tokenizer.json"
    tokenizer = json.loads(place.read_text(encoding="utf-8"))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **plain} for number, text in enumerate(_VISION, _FIRST)
    ]
    place.write_text(json.dumps(tokenizer), encoding="utf-8")
    place = folder / "tokenizer_config.json"
    settings = json.loads(place.read_text(encoding="utf-8"))
    names = {"image_token": _VISION[2], "video_token": _VISION[3]}
    settings |= {**names, "extra_special_tokens": names, "chat_template": _TEMPLATE, "model_max_length": 16384}
    place.write_text(json.dumps(settings), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {**_CONFIG, "vision_config": {**_ENCODER, "in_chans": 3, "spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _body(seed: int, count: int, side: int, *, is_smooth: bool) -> bytes:
    files = [jpeg(side, side, is_smooth=is_smooth, seed=seed + number) for number in range(count)]
    urls = ["data:image/jpeg;base64," + base64.b64encode(file).decode() for file in files]
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "balasen"}]}]
    return json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()


def _measured(url: str, bodies: list[bytes]) -> float:
    """CPU milliseconds of the API server for a request."""
    before = cpu_seconds()["main"]
    _ask(url, bodies)
    return round(1e3 * (cpu_seconds()["main"] - before) / len(bodies), 3)


def _ask(url: str, bodies: list[bytes]) -> None:
    place, left, lock = urllib.parse.urlparse(url), list(bodies), threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        while True:
            with lock:
                if not left:
                    return
                body = left.pop()
            connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text[:300]

    threads = [threading.Thread(target=client) for _ in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.5)  # what follows an answer


def _fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of a request with images, and what it and an image take more where images are processed."""
    import yaml

    lines = yaml.safe_load((_ROOT / "hardware_specs/calibrations/host_images.yaml").read_text(encoding="utf-8"))
    decoder, processor = lines["decoders"]["jpeg"], lines["processors"]["qwen_vl"]
    text, *others = rows
    factors, left = [], []
    fitted = [row for row in others if row["images"] * row["side"] ** 2 <= _FITTED]
    for row in (row for row in fitted):
        count, is_new, pixels = row["images"], not row["is_cached"], row["side"] ** 2
        known = pixels * decoder["pixel_s"] + row["file_bytes"] * decoder["byte_s"]
        known += is_new * (processor["image_s"] + pixels * (processor["pixel_s"] + processor["encoded_pixel_s"]))
        factors.append([1, is_new, count * is_new])
        left.append(row["cpu_ms_per_request"] - text["cpu_ms_per_request"] - 1e3 * count * known)
    slopes = non_negative(np.array(factors) / np.array(left)[:, None])
    names = ("request", "new_request", "new_image")
    return {name: round(float(value), 2) for name, value in zip(names, slopes, strict=True)}


if __name__ == "__main__":
    main()
