"""Weights of changed models: what stays is what it was, and a cut of nothing changes nothing."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import attention, tiny  # noqa: E402
from test_loading import random_decoder, write_safetensors  # noqa: E402

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models.architecture import DenseFFN  # noqa: E402
from perfmodel.models.changes import CHANGES  # noqa: E402
from perfmodel.models.model_changes import ModelChanges  # noqa: E402
from perfmodel.models.spec import ChangedFrom  # noqa: E402
from perfmodel.specs import EngineSpec, load_model, load_scenario  # noqa: E402
from perfmodel_executors.kernels.weight_formats import LowRankWeight, Sparse24Weight, dequantize  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.changed import changed_weights  # noqa: E402
from perfmodel_executors.models.decoder import Decoder, load_decoder  # noqa: E402
from perfmodel_executors.run import execute_scenario  # noqa: E402

LAYER = (attention(num_heads=8, num_kv_heads=4, head_dim=8, qkv_bias=True), DenseFFN(256))
MODEL = tiny(LAYER, LAYER, LAYER, LAYER, hidden_size=64)
FLOAT32 = EngineSpec(dtype="float32", block_size=4)


def changed(model=MODEL, seed=1, **fields):
    """(decoder of `model`, decoder with its weights changed)."""
    changes = ModelChanges.model_validate(fields)
    target = model
    for field, change in CHANGES.items():
        if getattr(changes, field) is not None:
            target = change(target, changes)
    plain = Decoder(model, torch.float32, seed)
    weights = changed_weights(plain.weights, ChangedFrom(model, changes))
    return plain, Decoder(target, torch.float32, weights=weights)


def logits(decoder, num_tokens=9):
    batch = build_batch([TokenSegment(tuple(range(1, num_tokens + 1)), 0, (0, 1, 2), True)], 4)
    return decoder.forward(batch, decoder.new_cache(4, 8))


@pytest.mark.parametrize(
    "fields",
    [
        {"prune": {"kind": "structured", "fraction": 0.0}},
        {"prune": {"kind": "unstructured", "fraction": 0.0}},
        {"prune": {"kind": "layers", "fraction": 0.0}},
        {"low_rank": {"rank": 64}},
        {"share_layers": 4},
        {"num_kv_heads": 4},
        {"num_kv_heads": 8},  # each head copied
    ],
    ids=str,
)
def test_a_change_that_leaves_all_gives_the_same_logits(fields):
    plain, other = changed(**fields)
    torch.testing.assert_close(logits(other), logits(plain), rtol=1e-4, atol=1e-4)


def test_heads_and_columns_of_zeros_are_cut_first_and_their_loss_changes_nothing():
    plain, _ = changed(share_layers=4)
    for layer in plain.weights.layers:
        q, k, v = layer.mixer.qkv.split([64, 32, 32])
        for rows in (q[16:32], k[8:16], v[8:16]):  # the second of four KV heads with its two query heads
            rows.zero_()
        layer.mixer.qkv_bias[16:32] = layer.mixer.qkv_bias[72:80] = layer.mixer.qkv_bias[104:112] = 0
        layer.mixer.out[:, 16:32] = 0
        layer.ffn.up[100:200] = 0
        layer.ffn.up[356:456] = 0
        layer.ffn.down[:, 100:200] = 0
    before = logits(plain)
    changes = ModelChanges.model_validate({"prune": {"kind": "structured", "fraction": 0.25}})
    target = CHANGES["prune"](MODEL, changes)
    (layer,) = {layer for layer, _ in target.layers}
    assert (layer.mixer.num_kv_heads, layer.mixer.num_heads, layer.ffn.intermediate_size) == (3, 6, 256)
    narrow = Decoder(target, torch.float32, weights=changed_weights(plain.weights, ChangedFrom(MODEL, changes)))
    torch.testing.assert_close(logits(narrow), before, rtol=1e-4, atol=1e-4)


def test_one_kv_head_stays_when_query_heads_are_pruned():
    model = tiny((attention(num_heads=8, num_kv_heads=1, head_dim=8), DenseFFN(256)), hidden_size=64)
    _, narrow = changed(model, prune={"kind": "structured", "fraction": 0.5})
    assert narrow.weights.layers[0].mixer.qkv.shape == ((4 + 2) * 8, 64)
    assert narrow.weights.layers[0].ffn.down.shape == (64, 128)
    assert logits(narrow).isfinite().all()


def test_layers_that_stay_are_spread_over_the_depth():
    plain, shallow = changed(prune={"kind": "layers", "fraction": 0.5})
    kept = [plain.weights.layers[i] for i in (0, 2)]
    assert all(ours is theirs for ours, theirs in zip(shallow.weights.layers, kept, strict=True))


def test_unstructured_pruning_leaves_the_largest_weights():
    plain, sparse = changed(prune={"kind": "unstructured", "fraction": 0.75})
    dense, kept = Decoder(MODEL, torch.float32, seed=1).weights.layers[0].ffn.up, sparse.weights.layers[0].ffn.up
    assert (kept != 0).float().mean() == pytest.approx(0.25, abs=1e-3)
    assert dense[kept == 0].abs().max() <= kept[kept != 0].abs().min()
    assert plain.model == sparse.model


def test_factors_keep_the_largest_singular_values():
    """Eckart and Young: the squared error is the sum of the squared singular values that are left out."""
    plain, thin = changed(low_rank={"rank": 16})
    dense, factored = plain.weights.layers[0].ffn.down, thin.weights.layers[0].ffn.down
    assert isinstance(factored, LowRankWeight)
    left_out = torch.linalg.svdvals(dense)[16:].square().sum()
    torch.testing.assert_close((dequantize(factored) - dense).square().sum(), left_out, rtol=1e-3, atol=1e-6)


def test_random_weights_come_in_the_changed_shapes():
    for fields in ({"low_rank": {"rank": 16}}, {"share_layers": 2}, {"prune": {"kind": "2:4"}}):
        decoder = Decoder(changed(**fields)[1].model, torch.float32)
        assert logits(decoder).isfinite().all()
    assert isinstance(decoder.weights.layers[0].ffn.up, Sparse24Weight)
    with pytest.raises(PerfmodelError, match="2:4 sparse weights in int8"):
        load_decoder(decoder.model, EngineSpec(dtype="float32", quantization="w8a16"))


def test_shared_layers_are_held_once():
    decoder = Decoder(changed(share_layers=2)[1].model, torch.float32)
    layers = decoder.weights.layers
    assert layers[0] is layers[2]
    assert layers[0] is not layers[1]


def test_what_needs_training_is_refused():
    with pytest.raises(PerfmodelError, match=r"model_changes\.ssm_layers: .* without training"):
        changed(ssm_layers={})


SCENARIO = """
model: {file}
hardware: cpu
engine: {{dtype: float32, block_size: 8, num_gpu_blocks_override: 32}}
traffic:
  arrivals: {{process: burst}}
  input_tokens: {{distribution: fixed, value: 6}}
  output_tokens: {{distribution: fixed, value: 3}}
  num_requests: 2
"""


def test_a_scenario_changes_the_weights_of_its_file(tmp_path):
    decoder = random_decoder(tmp_path)
    file = tmp_path / "model.safetensors"
    write_safetensors(decoder, file)
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO.format(file=file))
    text = ["model_changes.prune.kind=layers", "model_changes.prune.fraction=0.5", "engine.quantization=w8a8"]
    scenario = load_scenario(path, text)
    loaded = load_decoder(scenario.model, scenario.engine)
    (layer,) = loaded.weights.layers
    torch.testing.assert_close(dequantize(layer.mixer.out), decoder.weights.layers[0].mixer.out, rtol=0, atol=0.01)
    assert scenario.model.changed_from.original == load_model(file)
    assert f"changed from the weights of {file.name}" in execute_scenario(scenario).notes[-1]
    plain = load_scenario(path)
    assert plain.model.changed_from is None
    assert replace(plain.model, dtype="fp32").weights_path == str(file)
