"""A whole decoder on Triton kernels: prompts, then padded decodes as a GPU replays them; the tokens of torch's."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.models.architecture import Attention, DenseFFN, Layer, MoEFFN  # noqa: E402
from perfmodel.specs import EngineSpec, load_model  # noqa: E402
from perfmodel_executors.graphs import no_capture  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.runner import RunnerSetup, build_runner  # noqa: E402

MIXER = Attention(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16)
LAYERS = (Layer(MIXER, DenseFFN(48)), 1), (Layer(replace(MIXER, window=7), MoEFFN(4, 2, 32)), 1)
MODEL = replace(load_model("tiny-llama"), hidden_size=32, vocab_size=67, max_position_embeddings=64, layers=LAYERS)
ENGINE = EngineSpec(dtype="float32", max_num_seqs=4, max_model_len=48)


def served(kernels, quantization="none"):
    """Tokens of three sequences: their prompts in two steps, one beside a decode, then two decodes of all."""
    engine = ENGINE.model_copy(update={"quantization": quantization})
    setup = RunnerSetup(MODEL, engine, 6, torch.device("cpu"), seed=2, kernels=kernels)
    runner = build_runner(setup, capture=no_capture)
    a, b, c = [list(range(5, 5 + n)) for n in (9, 3, 18)]
    tables = [[4], [1], [3, 0]]
    first = runner.run([TokenSegment(a, 0, tables[0]), TokenSegment(b, 0, tables[1])])
    second = runner.run([TokenSegment(first[:1], len(a), tables[0]), TokenSegment(c, 0, tables[2])])
    rows = [(len(a) + 1, second[0]), (len(b), first[1]), (len(c), second[1])]
    steps = [first, second]
    for step in range(2):
        segments = [TokenSegment([rows[i][1]], rows[i][0] + step, tables[i]) for i in range(3)]
        tokens = runner.run(segments)
        rows = [(position, token) for (position, _), token in zip(rows, tokens, strict=True)]
        steps.append(tokens)
    return steps


@pytest.mark.parametrize("quantization", ["none", "w8a16"])
def test_triton_and_torch_generate_the_same_tokens(quantization):
    assert served("triton", quantization) == served("torch", quantization)
