"""Names of the Hugging Face Hub: its client's local cache, and a server on loopback that plays the Hub."""

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.models.hub import is_hub_name, load_from_hub
from perfmodel.specs import load_model

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
WITHOUT_DTYPE = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}


def safetensors(*tensors: tuple[str, str, list[int]]) -> bytes:
    """A file whose weights are all zero bits, and none of them here: the header is what is read."""
    header = {name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, dtype, shape in tensors}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


IN_HALVES = safetensors(("model.embed_tokens.weight", "F16", [100, 64]), ("model.norm.weight", "F32", [64]))
IN_BLOCKS = safetensors(
    ("model.layers.0.mlp.up_proj.weight", "F8_E4M3", [3072, 1024]),
    ("model.layers.0.mlp.up_proj.weight_scale_inv", "F32", [24, 8]),
    ("model.embed_tokens.weight", "BF16", [100, 64]),
)
PACKED = safetensors(("model.layers.0.mlp.up_proj.qweight", "I32", [384, 1024]))
INDEX = {"weight_map": {"b": "model-00002-of-00002.safetensors", "a": "model-00001-of-00002.safetensors"}}
FILES: dict[str, dict[str, object]] = {
    "org/halves": {"config.json": WITHOUT_DTYPE, "model.safetensors": IN_HALVES},
    "org/blocks": {
        "config.json": WITHOUT_DTYPE,
        "model.safetensors.index.json": INDEX,
        "model-00001-of-00002.safetensors": IN_BLOCKS,
    },
    "org/packed": {"config.json": WITHOUT_DTYPE, "model.safetensors": PACKED},
    "org/no-weights": {"config.json": WITHOUT_DTYPE},
    "org/plain": {"config.json": CONFIG, "generation_config.json": {"do_sample": True, "top_p": 0.95}},
    "org/modelopt": {"config.json": CONFIG, "hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}},
    "org/cut": {"config.json": json.dumps(CONFIG)[:80]},
    "org/weights-alone": {},
}
REFUSED = {"org/gated": (401, "GatedRepo"), "org/none": (404, "RepoNotFound"), "org/broken": (500, "")}
ASK = """
import json, sys
from perfmodel.errors import PerfmodelError
from perfmodel.models import hub
from perfmodel.specs import load_model
hub._ANSWER_S = 2.0
for name in sys.argv[1:]:
    try:
        model = load_model(name, ask_hub=True)
        form = [model.dtype, model.quantization.group_size]
        print(json.dumps([model.name, model.quantization.weights, model.sampling, model.source, *form]))
    except PerfmodelError as error:
        print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []
    released: ClassVar[Event] = Event()

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        self.asked.append(self.path)
        name, _, file = self.path.strip("/").partition("/resolve/main/")
        if name == "org/hangs":
            self.released.wait(30)
            return
        found = FILES.get(name, {}).get(file)
        if found is None:
            self._refuse(*REFUSED.get(name, (404, "EntryNotFound")))
            return
        body = found if isinstance(found, bytes) else (found if isinstance(found, str) else json.dumps(found)).encode()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted is not None:
            body = body[int(wanted[1]) : int(wanted[2]) + 1]
        self.send_response(200 if wanted is None else 206)
        headers = {"ETag": f'"{hash((name, file))}"', "X-Repo-Commit": "0" * 40, "Content-Length": str(len(body))}
        self._end(headers, body if has_body else b"")

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self._end({"X-Error-Code": code, "Content-Length": "0"}, b"")

    def _end(self, headers: dict[str, str], body: bytes) -> None:
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest's output is for failures."""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Hub.released.set()
    server.shutdown()


def asked(endpoint: str, home: Path, *names: str) -> tuple[list, list[str], str]:
    """(answers, what the server was asked for, stderr) of another process: the client reads its environment once."""
    Hub.asked.clear()
    proxies = {"http_proxy", "https_proxy", "all_proxy", "hf_hub_offline", "hf_hub_cache"}
    env = {name: value for name, value in os.environ.items() if name.lower() not in proxies}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines()], list(Hub.asked), done.stderr


def test_what_the_hub_answers_is_read_once_and_kept(endpoint: str, tmp_path: Path) -> None:
    host = endpoint.partition("://")[2]
    answers, paths, said = asked(endpoint, tmp_path, "org/plain", "org/modelopt", "lama-3.1-8b", "qwen3-8b")
    assert answers[0][:4] == ["org/plain", None, "top_p", f"config.json of org/plain ({host})"]
    assert answers[1][:3] == ["org/modelopt", "fp8", "greedy"]
    assert "Did you mean 'llama-3.1-8b'" in answers[2]
    assert answers[3][0] == "qwen3-8b"
    assert f"asking {host} for config.json of org/plain\n" in said
    assert {path.partition("/resolve/")[0] for path in paths} == {"/org/plain", "/org/modelopt"}
    again, paths, said = asked(endpoint, tmp_path, "org/plain", "org/modelopt")
    assert [each[:3] for each in again] == [each[:3] for each in answers[:2]]
    assert (paths, said) == ([], "")


def test_what_goes_wrong_is_one_sentence_with_a_way_out(endpoint: str, tmp_path: Path) -> None:
    names = ("org/gated", "org/none", "org/weights-alone", "org/cut", "org/hangs")
    gated, none, bare, cut, hangs = asked(endpoint, tmp_path, *names)[0]
    assert "it is gated; set HF_TOKEN" in gated
    assert "there is no such repository, or HF_TOKEN may not see it" in none
    assert "the repository has no config.json; give a config.json or a .gguf file" in bare
    assert "is not valid JSON" in cut
    assert "Delete " in cut
    assert "did not answer within 2 s" in hangs


def test_a_configuration_that_says_nothing_of_formats_leaves_it_to_a_header(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the only file, or of the first that the index names; asked for once, by ranges."""
    names = ("org/halves", "org/blocks", "org/no-weights", "org/packed")
    (halves, blocks, bare, packed), paths, _ = asked(endpoint, tmp_path, *names)
    assert (halves[1], *halves[4:]) == (None, "fp16", 0)
    assert (blocks[1], *blocks[4:]) == ("fp8", "bf16", 128)
    assert (bare[1], *bare[4:]) == (None, "bf16", 0)
    assert "stored as I32, and no config.json says how they are quantized" in packed
    assert not any("00002-of-00002" in path for path in paths)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_model("org/halves", ask_hub=True).dtype == "fp16"  # without a network, as the tests run
    assert load_model("org/blocks", ask_hub=True).quantization.weights == "fp8"


def test_weights_in_the_cache_are_looked_at_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--cached" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(IN_BLOCKS)
    found = load_model("org/cached", ask_hub=True)
    assert (found.quantization.weights, found.quantization.group_rows, found.dtype) == ("fp8", 128, "bf16")
    mxfp4 = safetensors(
        ("m.experts.gate_up_proj_blocks", "U8", [8, 90, 16]), ("m.experts.gate_up_proj_scales", "U8", [8])
    )
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(mxfp4)
    assert load_model("org/cached", ask_hub=True).quantization.weights == "mxfp4"
    nvfp4 = safetensors(("m.up_proj.weight", "U8", [8, 90]), ("m.up_proj.weight_scale_2", "F32", []))
    (snapshot / "model-00001-of-00002.safetensors").write_bytes(nvfp4)
    assert load_model("org/cached", ask_hub=True).quantization.weights == "nvfp4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama", "x": "' + "a" * 50_000_000 + '"}', "larger than 32 MB"),
        ('{"x": ' * 10_000 + "1" + "}" * 10_000, "nested too deeply"),
        ("[" * 10_000, "is not valid JSON"),
    ],
    ids=["50 MB", "10,000 deep", "10,000 opened"],
)
def test_a_configuration_that_is_a_bomb_ends_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    ran = CliRunner().invoke(app, ["memory", "--model", str(file), "--hardware", "h100"])
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SpecError, match=r"127.0.0.1:9 could not be reached within 3 s .*check HF_ENDPOINT"):
        load_from_hub("org/model")


def test_the_cache_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot that `main` refers to, of several."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--cached"
    for commit, layers in (("a" * 40, 4), ("b" * 40, 6)):
        snapshot = folder / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}), encoding="utf-8")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40, encoding="utf-8")
    found = load_model("org/cached", ask_hub=True)
    assert (found.num_layers, found.hf_id) == (4, "org/cached")
    assert "local cache" in found.source
    with pytest.raises(SpecError, match="HF_HUB_OFFLINE is set"):
        load_model("org/another", ask_hub=True)
    with pytest.raises(SpecError, match="unknown model"):
        load_model("org/cached")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", True),
        ("a.b/c_d-1.5", True),
        ("llama-3.1-8b", False),
        ("./models/x", False),
        ("models/x.yaml", False),
        ("a/b/c", False),
        ("a/../b", False),
        ("org/na me", False),
        ("org/$(id)", False),
        ("http://host/x", False),
    ],
)
def test_only_names_of_repositories_are_ever_asked_for(text: str, expected: bool) -> None:
    assert is_hub_name(text) is expected
