"""A whole decoder on Triton kernels: prompts, then padded decodes as a GPU replays them; the tokens of torch's."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("triton", reason="Triton kernels need triton")

from perfmodel.models.architecture import (  # noqa: E402
    Attention,
    DenseFFN,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Mamba,
    MoEFFN,
)
from perfmodel.specs import EngineSpec, load_model  # noqa: E402
from perfmodel_executors.graphs import no_capture  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment  # noqa: E402
from perfmodel_executors.runner import RunnerSetup, build_runner  # noqa: E402

MIXER = Attention(num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16)
LAYERS = (Layer(MIXER, DenseFFN(48)), 1), (Layer(replace(MIXER, window=7), MoEFFN(4, 2, 32)), 1)
MODEL = replace(load_model("tiny-llama"), hidden_size=32, vocab_size=67, max_position_embeddings=64, layers=LAYERS)


def of(mixer, ffn=LAYERS[0][0].ffn):
    """A model with a layer of `mixer` and one of attention."""
    return replace(MODEL, layers=((Layer(mixer, ffn), 1), LAYERS[1]))


ENGINE = EngineSpec(dtype="float32", max_num_seqs=4, max_model_len=48)


MIXERS = {
    "attention": MODEL,
    "latents": of(LatentAttention(4, None, 16, 8, 8, 8)),
    "mamba": of(Mamba(num_heads=4, head_dim=16, state_size=16, num_groups=2, conv_kernel=4), None),
    "delta-net": of(GatedDeltaNet(2, 4, 16, 16, 4)),
}


def served(kernels, quantization="none", model=MODEL):
    """Tokens of three sequences: their prompts in two steps, one beside a decode, then two decodes of all."""
    is_eager = any(isinstance(layer.mixer, Mamba | GatedDeltaNet) for layer, _ in model.layers)
    engine = ENGINE.model_copy(update={"quantization": quantization, "enforce_eager": is_eager})
    setup = RunnerSetup(model, engine, 6, torch.device("cpu"), seed=2, kernels=kernels)
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


@pytest.mark.parametrize(("mixer", "quantization"), [*((mixer, "none") for mixer in MIXERS), ("attention", "w8a16")])
def test_triton_and_torch_generate_the_same_tokens(mixer, quantization):
    model = MIXERS[mixer]
    assert served("triton", quantization, model) == served("torch", quantization, model)
