"""The executed decoder against Hugging Face's `transformers`: equal weights, equal logits, whatever a step computes.

Each family as a tiny random model in fp32, saved as safetensors and loaded here. Sequences go through the paged cache
in uneven chunks and single tokens, several at once; the reference sees each whole sequence in one pass without a cache.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
safetensors = pytest.importorskip("safetensors.torch", reason="needs perfmodel[weights]")
pytest.importorskip("transformers", reason="needs perfmodel[test]")

from perfmodel.models import list_models, load_model  # noqa: E402
from perfmodel.models.executed import FAMILIES, why_not_executed  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.kernels.stored_rows import ExpertWeight  # noqa: E402
from perfmodel_executors.kernels.swiglu import ACTIVATIONS  # noqa: E402
from perfmodel_executors.kernels.weight_formats import dequantize, fp4_from_pairs  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402
from perfmodel_executors.models.mixers import MIXERS  # noqa: E402
from perfmodel_executors.models.rotations import SCALINGS  # noqa: E402
from perfmodel_executors.parity import REFERENCES, TOLERANCE, build, executed, largest_difference  # noqa: E402  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
ROW = re.compile(r"^\| (?P<family>[^|]+?) \| (?P<shown>[^|]+?) \| (?P<difference>[\d.e-]+) \|$", re.MULTILINE)
# Their classes are those of another family, with other sizes: the text part of Gemma 3, and checkpoints with code of
# their own whose decoder is DeepSeek-V3's (Kimi K2) or Qwen2's (MiMo).
SAME_COMPUTATION = {"gemma3": "gemma3_text", "kimi_k2": "deepseek_v3", "mimo": "qwen2"}


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_are_those_of_transformers(name, tmp_path):
    reference = REFERENCES[name]
    model = build(reference)
    assert largest_difference(executed(reference, model, tmp_path), model) <= TOLERANCE


def test_experts_stored_in_mxfp4_are_those_that_transformers_dequantises(tmp_path):
    """gpt-oss as published: blocks of 32 E2M1 codes with an exponent each, here random ones."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    reference = replace(REFERENCES["gpt-oss"], fields=REFERENCES["gpt-oss"].fields | sizes)
    model = build(reference)
    executed(reference, model, tmp_path)  # writes the files
    path, generator = tmp_path / "model.safetensors", torch.Generator().manual_seed(3)
    tensors = safetensors.load_file(path)
    for index, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            full = f"model.layers.{index}.mlp.experts.{name}"
            experts, width, rows = tensors.pop(full).shape
            blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
            tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
            plain = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            stored = fp4_from_pairs(blocks.flatten(0, 1), scales.flatten(0, 1))
            assert torch.equal(dequantize(stored).view(experts, rows, width).transpose(1, 2), plain)
            getattr(layer.mlp.experts, name).data.copy_(plain)
    safetensors.save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    plain_modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stored_as = {"quant_method": "mxfp4", "modules_to_not_convert": plain_modules}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored_as}))
    decoder = load_decoder(load_model(path), EngineSpec(dtype="float32", block_size=4))
    assert all(isinstance(layer.ffn.up, ExpertWeight) for layer in decoder.weights.layers)
    assert largest_difference(decoder, model) <= TOLERANCE


def test_every_family_that_is_executed_is_compared():
    """`unknown` is a file that names no family, read as a Llama-like decoder."""
    compared = {reference.model_type for reference in REFERENCES.values()}
    assert compared | set(SAME_COMPUTATION) | {"unknown"} == set(FAMILIES)
    assert set(SAME_COMPUTATION.values()) <= compared


def test_what_specs_call_executed_is_in_the_executor():
    from perfmodel.models.executed import ACTIVATIONS as NAMED
    from perfmodel.models.executed import ROPE_SCALINGS

    assert set(NAMED) == {*ACTIVATIONS, "swiglu_oai"}
    assert set(ROPE_SCALINGS) == set(SCALINGS)
    assert {kind.__name__ for kind in MIXERS} == {
        "Attention",
        "GatedDeltaNet",
        "LatentAttention",
        "LinearAttention",
        "Mamba",
    }


def test_the_page_has_the_families_that_are_compared():
    rows = {row["family"]: row for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
    assert list(rows) == list(dict.fromkeys(reference.family for reference in REFERENCES.values()))
    for family, row in rows.items():
        shown = [name for name, reference in REFERENCES.items() if reference.family == family]
        assert row["shown"] == ", ".join(f"`{name}`" for name in shown)
        assert float(row["difference"]) <= TOLERANCE


def test_the_page_has_the_cards_that_are_simulated_alone():
    """A line for each reason, with the types of the models that it is the reason for."""
    listed = set(re.findall(r"^- `(\w+)`: (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    models = map(load_model, list_models())
    assert listed == {(each.model_type, why) for each in models if (why := why_not_executed(each)) is not None}
