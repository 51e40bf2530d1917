"""Vectors of the executed decoder against those of Hugging Face's models without a language head."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("safetensors.torch", reason="needs perfmodel[weights]")
transformers = pytest.importorskip("transformers", reason="needs perfmodel[test]")

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.models import load_model  # noqa: E402
from perfmodel.specs import EngineSpec  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402

SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 12, "vocab_size": 200, "max_position_embeddings": 64}
BLOCK = 4


def saved(folder, model_type="qwen3", **fields):
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **fields)
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # norms of weights other than 1, which a missing final norm would not show
        for name, tensor in model.named_parameters():
            tensor.add_(0.3 * torch.randn(tensor.shape)) if "norm" in name else None
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "mistral"])
def test_vectors_are_the_normalised_last_states_of_transformers(model_type, tmp_path):
    """A prompt of 23 tokens in chunks of 9, 11 and 3 beside one of 14: each row's vector, the last ones with them."""
    model = saved(tmp_path, model_type)
    spec = load_model(tmp_path)
    assert (spec.pooling, spec.num_labels) == ("last", 0)
    decoder = load_decoder(spec, EngineSpec(dtype="float32", block_size=BLOCK, max_model_len=64))
    texts = [torch.randint(0, 200, (length,)).tolist() for length in (23, 14)]
    tables = [list(range(6))[::-1], list(range(6, 12))]
    with torch.inference_mode():
        expected = [torch.nn.functional.normalize(model(torch.tensor([t])).last_hidden_state[0], dim=-1) for t in texts]
        cache = decoder.new_cache(BLOCK, 12)
        for parts in ([(0, 0, 9), (1, 0, 14)], [(0, 9, 20)], [(0, 20, 23)]):
            segments = [TokenSegment(texts[i][a:b], a, tables[i], is_verified=True) for i, a, b in parts]
            vectors = decoder.forward(build_batch(segments, BLOCK, decoder.device), cache)
            wanted = torch.cat([expected[i][a:b] for i, a, b in parts])
            assert vectors.shape == wanted.shape
            assert float((vectors - wanted).abs().max()) < 1e-5
            assert torch.allclose(vectors.norm(dim=-1), torch.ones(len(vectors)))


@pytest.mark.parametrize(("changes", "what"), [({"pooling": "mean"}, "other states"), ({"num_labels": 2}, "scores")])
def test_other_poolers_are_refused_by_name(changes, what, tmp_path):
    from dataclasses import replace

    saved(tmp_path)
    with pytest.raises(PerfmodelError, match=f"{what}.*not executed yet"):
        load_decoder(replace(load_model(tmp_path), **changes), EngineSpec(dtype="float32"))
