"""One kernel for prompts and decodes stands for the two of its own layers, whatever other layers a model has."""

from perfmodel.ops import build_graph
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
