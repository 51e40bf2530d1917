"""Whatever a model's files say is computed as the reference computes it, or refused in a sentence.

Fields: each that the reference's configuration class knows is changed in turn, so that one which comes with a new
version is noticed. Tensors: each of a file is read, or named in an error."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
safetensors = pytest.importorskip("safetensors.torch", reason="needs perfmodel[weights]")
pytest.importorskip("transformers", reason="needs perfmodel[test]")

from perfmodel.errors import PerfmodelError, SpecError  # noqa: E402
from perfmodel.models import load_model  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402
from perfmodel_executors.parity import REFERENCES, TOLERANCE, build, executed, largest_difference  # noqa: E402

# One of each family: the first of its references.
FIRST = {reference.model_type: name for name, reference in reversed(REFERENCES.items())}
# Sizes of tensors: a file that has others is another model.
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size"),
    *("max_position_embeddings", "initializer_range"),
}
# Transformers limits Nemotron-H's time steps by it, and only in prompts; NVIDIA's own code and vLLM do not.
AS_OTHERS_COMPUTE = {("nemotron_h", "time_step_min")}


def others(name, value):
    """Values that a field has in other files."""
    if name.endswith(("_act", "_activation")):
        return ["gelu", "relu", "gelu_pytorch_tanh"]
    if name == "topk_method":
        return ["greedy", "group_limited_greedy"]
    if isinstance(value, bool):
        return [not value]
    if value is None:
        return [True, 0.37, 5]
    if isinstance(value, float):
        return [0.3 if "eps" in name else 0.7 * value + 0.11]
    return [value + 1] if isinstance(value, int) else []


def changed_references(model_type):
    """(field, value, reference, its model) for all that the reference itself can compute."""
    reference = REFERENCES[FIRST[model_type]]
    for name, value in build(reference).config.to_dict().items():
        for other in [] if name in SIZES else others(name, value):
            changed = replace(reference, fields=reference.fields | {name: other})
            try:
                model = build(changed)
                model(torch.tensor([[1, 2, 3]]), use_cache=False).logits.mean()
            except Exception:
                continue
            yield name, other, changed, model


@pytest.mark.release
@pytest.mark.parametrize("model_type", FIRST)
def test_each_field_is_computed_as_the_reference_does_or_refused(model_type, tmp_path):
    compared = 0
    for name, value, reference, model in changed_references(model_type):
        folder = tmp_path / f"{name}-{value}"
        try:
            difference = largest_difference(executed(reference, model, folder), model)
        except PerfmodelError:
            continue
        if (model_type, name) not in AS_OTHERS_COMPUTE:
            assert difference <= TOLERANCE, f"{name}={value}"
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        ("gpt-oss", {"swiglu_limit": 5.0}, "swiglu_limit=5.0 of gpt_oss models is not executed"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias=True of deepseek_v3 models is not executed"),
        ("gemma3", {"use_bidirectional_attention": True}, "attention to later tokens is not executed"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act=gelu of mamba2 models is not executed"),
    ],
)
def test_a_field_that_is_not_honoured_is_named(name, fields, sentence, tmp_path):
    reference = replace(REFERENCES[name], fields=REFERENCES[name].fields | fields)
    with pytest.raises(PerfmodelError, match=sentence):
        executed(reference, build(reference), tmp_path)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"hidden_act": "relu"}),  # gated all the same, as in ReLU Llama
        ("deepseek-v2-lite", {"n_group": 4, "topk_group": 2}),  # a greedy choice knows no groups
        ("deepseek-v3", {"rms_norm_eps": 0.3}),  # not of norms of latents
        ("nemotron-h", {"use_bias": True}),
    ],
)
def test_what_a_class_does_whatever_its_file_says(name, fields, tmp_path):
    reference = replace(REFERENCES[name], fields=REFERENCES[name].fields | fields)
    model = build(reference)
    assert largest_difference(executed(reference, model, tmp_path), model) <= TOLERANCE


def load_with(folder, name, extra):
    """A decoder from the files of a reference that have tensors besides its own, `extra` (name -> shape)."""
    build(REFERENCES[name]).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    safetensors.save_file(tensors | {name: torch.randn(shape) for name, shape in extra.items()}, path)
    return load_decoder(load_model(path), EngineSpec(dtype="float32", block_size=4))


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    "extra",
    [
        {f"{LAYER}.self_attn.q_proj.bias": (48,)},
        {f"{LAYER}.self_attn.q_norm.weight": (12,)},
        {f"{LAYER}.self_attn.q_proj.lora_A.weight": (4, 48), f"{LAYER}.self_attn.q_proj.lora_B.weight": (48, 4)},
        {f"{LAYER}.mlp.down_proj.weight_scale": (1,)},
    ],
)
def test_a_tensor_that_nobody_reads_is_named(extra, tmp_path):
    with pytest.raises(SpecError, match=f"{len(extra)} of .* no place in the decoder .*{next(iter(extra))}"):
        load_with(tmp_path, "llama", extra)


def test_encoders_and_layers_that_draft_are_left_aside(tmp_path):
    load_with(tmp_path, "llama", {"vision_tower.layers.0.weight": (2,), "model.layers.2.eh_proj.weight": (2, 2)})


def test_a_tied_head_may_be_stored_again_but_not_as_another(tmp_path):
    name = "llama-mqa"
    build(REFERENCES[name]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(path)
    for head, is_equal in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.randn(101, 48), False)):
        safetensors.save_file(tensors | {"lm_head.weight": head}, path)
        if is_equal:
            load_decoder(load_model(path), EngineSpec(dtype="float32", block_size=4))
        else:
            with pytest.raises(SpecError, match=r"lm_head\.weight"):
                load_decoder(load_model(path), EngineSpec(dtype="float32", block_size=4))
