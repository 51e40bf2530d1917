"""Arguments that only engines for a single machine have: refused elsewhere, with the way out."""

import pytest

from perfmodel.errors import SpecError
from perfmodel.specs import load_scenario


def _refused(tmp_path, lines, hardware="rtx-4090"):
    file = tmp_path / "asked.yaml"
    file.write_text(
        f"name: asked\nmodel: llama-3.1-8b\nhardware: {hardware}\nengine:\n"
        + "".join(f"  {line}\n" for line in lines)
        + "traffic:\n  arrivals: {process: closed_loop, concurrency: 1}\n  num_requests: 2\n"
        "  input_tokens: {distribution: fixed, value: 100}\n  output_tokens: {distribution: fixed, value: 10}\n"
    )
    with pytest.raises(SpecError) as error:
        load_scenario(file)
    return str(error.value)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["profile: vllm", "backend: cuda"], "got cuda, and vllm has one backend only; leave it out"),
        (
            ["profile: llamacpp", "backend: metal"],
            "got metal on rtx-4090 (a gpu); expected there: cuda",
        ),
        (["profile: mlx"], "the engine has no backend for rtx-4090 (a gpu)"),
        (["profile: vllm", "layer_split: 2"], "got 2, which vllm does not have"),
        (["profile: vllm", "n_gpu_layers: 20", "cpu: ryzen-9-7950x"], "got 20, which vllm does not have"),
        (["profile: llamacpp", "n_gpu_layers: 20"], "got n_gpu_layers=20 without cpu"),
        (["profile: llamacpp", "backend: nonsense"], "nonsense"),
    ],
)
def test_refused(tmp_path, lines, said):
    assert said in _refused(tmp_path, lines)


def test_a_cpu_keeps_no_layers_of_its_own(tmp_path):
    lines = ["profile: llamacpp", "n_gpu_layers: 20", "cpu: ryzen-9-7950x"]
    assert "engine.n_gpu_layers: got 20 on ryzen-9-7950x, a CPU," in _refused(tmp_path, lines, "ryzen-9-7950x")


def test_a_cpu_runs_what_a_gpu_does():
    assert load_scenario("llama-3.2-3b-ryzen-9-7950x").hardware.kind == "cpu"
