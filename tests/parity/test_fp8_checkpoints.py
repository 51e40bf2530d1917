"""Checkpoints in e4m3 with a scale for each 128 x 128 weights (`weight_scale_inv`): DeepSeek-V3's format, and Qwen3's.

Their weights dequantised are those of a reference model; stored as they are, inputs of 128 share a scale as well, which
the reference's linear layers are made to do here.
"""

import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
safetensors = pytest.importorskip("safetensors.torch", reason="needs perfmodel[weights]")
pytest.importorskip("transformers", reason="needs perfmodel[test]")

from torch.nn import functional  # noqa: E402

from perfmodel.errors import SpecError  # noqa: E402
from perfmodel.models import load_model  # noqa: E402
from perfmodel.models.params import weight_bytes  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.kernels.stored_rows import ExpertWeight  # noqa: E402
from perfmodel_executors.kernels.weight_formats import BlockFp8Weight, RowsWeight  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402
from perfmodel_executors.parity import BLOCK, REFERENCES, TOLERANCE, build, largest_difference  # noqa: E402  # noqa: E402

SETTINGS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_WIDE = {"hidden_size": 192, "intermediate_size": 160}
_LATENT = _WIDE | {
    "hidden_size": 256,
    "q_lora_rank": 136,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 128,
}
CASES = {
    "qwen3": _WIDE | {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3-moe": _WIDE | {"head_dim": 64, "moe_intermediate_size": 128},
    "deepseek-v3": _LATENT,
}
PLAIN = ("norm", "embed_tokens", "lm_head", "mlp.gate.")


def in_blocks(weight):
    """(e4m3, scales), as DeepSeek's own conversion has them: the largest of a block on 448."""
    n, k = weight.shape
    rows, columns = -(-n // 128), -(-k // 128)
    padded = functional.pad(weight, (0, 128 * columns - k, 0, 128 * rows - n))
    blocks = padded.view(rows, 128, columns, 128)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:n, :k].contiguous(), scales


def written(name, folder):
    """(the path of a checkpoint in e4m3 blocks, the reference with its weights dequantised)"""
    reference = REFERENCES[name]
    model = build(replace(reference, fields=reference.fields | CASES[name]))
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    for full in [name for name, each in tensors.items() if each.dim() == 2 and not any(p in name for p in PLAIN)]:
        values, scales = in_blocks(tensors[full])
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: values.shape[0], : values.shape[1]]
        _give(model, full, values.float() * wide)
        tensors |= {full: values, f"{full}_scale_inv": scales}
    safetensors.save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return path, model


def _give(model, full, values):
    """Sets a weight of the reference, which holds the matrices of all experts in one or two tensors."""
    *parent, leaf, _ = full.split(".")
    if "experts" in parent and leaf in ("gate_proj", "up_proj", "down_proj") and parent[-1].isdigit():
        experts, index = model.get_submodule(".".join(parent[:-1])), int(parent[-1])
        if leaf == "down_proj":
            experts.down_proj.data[index] = values
        else:
            half = slice(0, 128) if leaf == "gate_proj" else slice(128, 256)
            experts.gate_up_proj.data[index, half] = values
        return
    model.get_parameter(full).data.copy_(values)


def decoder_of(path, quantization=None):
    return load_decoder(load_model(path), EngineSpec(dtype="float32", block_size=BLOCK, quantization=quantization))


@pytest.mark.parametrize("name", CASES)
def test_dequantised_weights_give_the_logits_of_transformers(name, tmp_path):
    path, model = written(name, tmp_path)
    assert largest_difference(decoder_of(path, "none"), model) <= TOLERANCE


def apart(decoder, model):
    """(norm of the reference's logits of a text, norm of the differences)"""
    text = torch.randint(1, 101, (24,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        batch = build_batch([TokenSegment(text.tolist(), 0, range(6), is_verified=True)], BLOCK, decoder.device)
        expected = model(text[None], use_cache=False).logits[0]
        logits = decoder.forward(batch, decoder.new_cache(BLOCK, 6))
    return float(expected.norm()), float((logits - expected).norm())


def _rounded(module, inputs):
    """Inputs in e4m3 with a scale for each token and 128 of them, and back (DeepSeek-V3, section 3.3.2)."""
    (x,) = inputs
    groups = functional.pad(x, (0, -x.shape[-1] % 128)).reshape(-1, 128)
    scales = (groups.abs().amax(dim=1, keepdim=True) / 448).clamp_min(1e-12)
    values = (groups / scales).to(torch.float8_e4m3fn).float() * scales
    return (values.view(*x.shape[:-1], -1)[..., : x.shape[-1]],)


def test_stored_blocks_are_multiplied_by_inputs_in_e4m3(tmp_path):
    """Queries and keys are one matrix of whole blocks; values begin within one, and are multiplied after them. A
    reference whose inputs are rounded too is nearer by far than one whose inputs are not; inputs on the edge between
    two codes may go either way, and the next layers see that."""
    path, model = written("qwen3", tmp_path)
    stored = decoder_of(path)
    qkv = stored.weights.layers[0].mixer.qkv
    assert isinstance(qkv, RowsWeight)
    assert [part.shape[0] for part in qkv.parts] == [128 + 64, 64]
    logits, unrounded = apart(stored, model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(_rounded)
    _, rounded = apart(stored, model)
    assert unrounded < 0.2 * logits
    assert rounded < unrounded / 4


def test_experts_and_latent_attention_stay_in_their_blocks(tmp_path):
    """Bytes as counted; what expands latents is held plain, since it is folded into queries and outputs."""
    path, model = written("deepseek-v3", tmp_path)
    stored, counted = decoder_of(path), weight_bytes(load_model(path))
    assert len(stored.weights.layers) == model.config.num_hidden_layers
    held = {"dense_ffn": 0, "experts": 0, "shared_experts": 0}
    for layer in stored.weights.layers:
        assert all(isinstance(x, BlockFp8Weight) for x in (layer.mixer.q_down, layer.mixer.q_up, layer.mixer.out))
        is_dense = not hasattr(layer.ffn, "router")
        if is_dense:
            held["dense_ffn"] += sum(each.values_NK.nbytes for each in (*layer.ffn.up.parts, layer.ffn.down))
            continue
        assert isinstance(layer.ffn.up, ExpertWeight)
        held["experts"] += sum(each.stacked.values_NK.nbytes for each in (layer.ffn.up, layer.ffn.down))
        held["shared_experts"] += sum(each.values_NK.nbytes for each in (layer.ffn.shared.up, layer.ffn.shared.down))
    scales = 1 + 4 / 128**2  # one of four bytes for each block
    assert {name: counted[name] for name in held} == pytest.approx({n: b * scales for n, b in held.items()}, rel=1e-6)
    logits, rounding = apart(stored, model)
    assert rounding < 0.3 * logits  # of inputs, by up to 2^-4 of each; other weights would be off by sqrt(2)


def test_scales_of_other_blocks_are_refused(tmp_path):
    path, _ = written("qwen3", tmp_path)
    tensors = safetensors.load_file(path)
    full = "model.layers.0.mlp.up_proj.weight_scale_inv"
    tensors[full] = torch.ones(1, 1)
    safetensors.save_file(tensors, path)
    with pytest.raises(SpecError, match=r"up_proj\.weight_scale_inv has the shape \(1, 1\), but .* has \(2, 2\)"):
        decoder_of(path)
