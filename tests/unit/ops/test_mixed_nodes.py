"""One kernel for prompts and decodes stands for the two of its own layers, whatever other layers a model has."""

from perfmodel.ops import build_graph
from perfmodel.ops.attention.decode import attention_decode, mixed_attention
from perfmodel.ops.attention.prefill import Heads, flash_prefill
from perfmodel.specs import list_models, load_model


def test_a_kernel_for_prompts_and_decodes_stands_for_those_of_its_layers() -> None:
    """gpt-oss: only the layers that see everything have one; Llama: all layers are of one kind."""
    (node, parts) = build_graph(load_model("gpt-oss-120b")).mixed[0]
    assert [part.name for part in parts] == ["attention_prefill@full", "attention_decode@full"]
    assert node.count == parts[0].count == 18
    (_, parts) = build_graph(load_model("llama-3.1-8b")).mixed[0]
    assert [part.name for part in parts] == ["attention_prefill", "attention_decode"]
    for name in list_models():
        assert all(len(parts) == 2 for _, parts in build_graph(load_model(name)).mixed)


def test_without_a_prompt_or_without_a_decode_there_is_no_mixed_work() -> None:
    heads = Heads(32, 8, 128, 128, "bf16", 2, 2)
    assert mixed_attention([(100, 50)], 0, 0, heads).num_kernels == 0
    assert mixed_attention([], 4, 400, heads).num_kernels == 0
    both = mixed_attention([(100, 50)], 4, 400, heads)
    apart = flash_prefill([(100, 50)], heads), attention_decode(4, 400, heads)
    assert both.flops == sum(work.flops for work in apart)
    assert both.hbm_bytes == sum(work.hbm_bytes for work in apart)
