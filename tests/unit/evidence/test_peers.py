"""`benchmarks/peers`: BLIS's law of a step as it was restated, and how peers are asked."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from perfmodel.ops.work import BatchShape
from perfmodel.specs import load_model

ROOT = Path(__file__).resolve().parents[3]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"peers_{name}", ROOT / "benchmarks" / "peers" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


blis, environments = _load("blis"), _load("environments")


@pytest.mark.parametrize(("rate", "e2el_s", "itl_ms"), [(2.5, 3.1973, 12.792), (6, 3.4103, 13.647)])
def test_blis_law_gives_the_itl_that_its_authors_publish(rate: float, e2el_s: float, itl_ms: float) -> None:
    """inference-sim/sim-to-real-accuracy-validation @378810d, results_iter36/error_records.csv, run 59: BLIS's own
    prediction of Qwen3-14B on an H100 with prompts of 574 and answers of 248 tokens. By Little's law rate * latency
    requests decode at once, half of their answers done."""
    batch = rate * e2el_s
    law = blis.LawOfStep(load_model("qwen3-14b"), "h100-sxm-80gb")
    one, two = (law.duration_us(BatchShape(n, n, num_decodes=n, decode_context=n * (574 + 124))) for n in (1, 2))
    assert (one + (batch - 1) * (two - one) + 45.9) / 1e3 == pytest.approx(itl_ms, rel=0.005)


def test_blis_law_of_experts_and_two_ranks_is_the_sum_of_its_terms() -> None:
    """Mixtral-8x7B on two H100s, 16 sequences of 700 tokens. Attention's weights: 32 layers of 4096 (2 * 4096 + 2 *
    1024); experts': 32 * 3 * 4096 * 8 * 14336; two bytes each, half a rank. KV: 32 * 2 * 1024 / 2 * 2 B a token.
    Messages: 64 all-reduces of 16 tokens of 4096, 4 B, half of them sent. No extra for experts in all layers."""
    weights = 32 * 4096 * (2 * 4096 + 2 * 1024) + 32 * 3 * 4096 * 8 * 14336
    memory = 1.36252915 * weights + 1.94710771 * 65536 * 16 * 700
    messages = 0.752037 * 64 * 16 * 4096 * 4 / 2
    expected = (memory + messages) / 3.35e6 + 32 * 32.09546717 + 16 * 4.41684444 + 126.024825
    law = blis.LawOfStep(load_model("mixtral-8x7b"), "h100-sxm-80gb", 2)
    shape = BatchShape(16, 16, num_decodes=16, decode_context=16 * 700)
    assert law.duration_us(shape) == pytest.approx(expected, rel=1e-9)
    # A prompt of 512 tokens beside them, 100 of them cached before: 0.152128 of its FLOPs, its messages, a request.
    attended = 512 * (1.5 * 512 + 100)
    flops = 32 * (2 * 512 * 4096 * 10240 / 2 + 4 * 16 * attended * 128) + 32 * 6 * 4096 * 512 * 2 * 14336 / 2
    more = 0.152128 * flops / 989.5e6 + 0.752037 * 64 * 512 * 4096 * 2 / 3.35e6 + 4.41684444
    mixed = shape._replace(num_tokens=528, prefills=((512, 100),))
    assert law.duration_us(mixed) == pytest.approx(expected + more, rel=1e-9)


def test_peer_is_asked_once_and_answers_in_the_order_of_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, sys\nfor q in json.load(sys.stdin):\n    print('asked', q, file=sys.stderr)\n"
        "    if q == 9:\n        break\n    print(json.dumps([q * 2, q * 3]), flush=True)\n"
    )
    (tmp_path / "peer-1.0" / "bin").mkdir(parents=True)
    (tmp_path / "peer-1.0" / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "peer-1.0" / "complete").touch()
    monkeypatch.setattr(environments, "PLACE", tmp_path)
    monkeypatch.setattr(environments, "__file__", str(tmp_path / "environments.py"))
    peer = environments.Peer("peer-1.0", "ask.py", ())
    assert peer.version == "1.0"
    assert peer.answers([3, 1, 3]) == [[6, 9], [2, 3], [6, 9]]
    assert capfd.readouterr().err.count("asked 3\n") == 1
    assert peer.answers([1, 4]) == [[2, 3], [8, 12]]
    assert "asked 1\n" not in capfd.readouterr().err
    with pytest.raises(SystemExit, match="all 2 questions"):
        peer.answers([9, 5])
