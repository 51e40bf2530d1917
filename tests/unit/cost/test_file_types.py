"""Which GGUF types fit a device: the counts of layers are the largest that the memory plan holds."""

import pytest

from perfmodel.commands.runs import MemoryRequest
from perfmodel.cost import plan_memory
from perfmodel.cost.memory.file_types import fits_of_types
from perfmodel.errors import DoesNotFitError
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.params import weight_bytes
from perfmodel.specs import EngineSpec, load_hardware, load_model

ENGINE = EngineSpec(profile="llamacpp", max_num_seqs=1, max_model_len=4096, gpu_memory_utilization=0.95, block_size=32)
MODEL, CARD = load_model("llama-3.1-70b"), load_hardware("rtx-4090")


def _holds(file_type, layers):
    asked = ENGINE.model_copy(update={"quantization": file_type, "n_gpu_layers": layers, "cpu": "ryzen-9-7950x"})
    try:
        return plan_memory(MODEL, CARD, asked).max_batch(4096) >= 1
    except DoesNotFitError:
        return False


def test_one_layer_more_does_not_fit():
    for each in fits_of_types(MODEL, CARD, ENGINE):
        assert _holds(each.file_type, each.layers)
        assert each.fits or not _holds(each.file_type, each.layers + 1)
        assert each.num_layers == 81
        assert bool(each.max_context) is each.fits


def test_smaller_types_put_more_layers_on_the_device():
    found = fits_of_types(MODEL, CARD, ENGINE)
    by_size = sorted(found, key=lambda each: -each.weight_bytes)
    assert [each.layers for each in by_size] == sorted(each.layers for each in found)
    q8 = next(each for each in found if each.file_type == "q8_0")
    assert q8.weight_bytes == pytest.approx(sum(weight_bytes(with_quantization(MODEL, "q8_0")).values()), rel=1e-3)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b"])
def test_all_layers_by_default_equal_all_layers_by_count(model):
    """The embedding table stays with the host (llama.cpp, `dev_input`); a tied head is a copy of it on the device."""
    model = load_model(model)
    counted = ENGINE.model_copy(update={"n_gpu_layers": model.num_layers + 1, "cpu": "ryzen-9-7950x"})
    by_default, by_number = (plan_memory(model, CARD, engine) for engine in (ENGINE, counted))
    assert by_default.weights == by_number.weights
    assert "embedding" not in by_default.weights
    assert "embedding" in plan_memory(model, load_hardware("ryzen-9-7950x"), ENGINE).weights


def test_an_explicit_context_of_the_models_length_is_kept():
    flags = (("model", "llama-3.1-8b"), ("hardware", "rtx-4090"))
    for changes, context in (([], 4096), (["engine.max_model_len=131072"], 131072)):
        loaded = MemoryRequest(flags=flags, overrides=("engine.profile=llamacpp", *changes)).load()
        assert loaded.engine.max_model_len == 131072
        asked = fits_of_types(loaded.model, loaded.hardware, loaded.engine)[0].asked
        assert (asked.slots, asked.context) == (1, context)


def test_the_device_holds_only_its_layers():
    """40 of 80 layers: half of the layers' weights and of the KV cache, and neither table nor head."""
    whole = ENGINE.model_copy(update={"quantization": "q4_0"})
    half = whole.model_copy(update={"n_gpu_layers": 40, "cpu": "ryzen-9-7950x"})
    part, all_of_it = (plan_memory(MODEL, load_hardware("h200-sxm"), engine) for engine in (half, whole))
    assert part.weights["dense_ffn"] == pytest.approx(all_of_it.weights["dense_ffn"] / 2)
    assert part.kv_bytes_per_token == pytest.approx(all_of_it.kv_bytes_per_token / 2)
    assert not {"embedding", "lm_head"} & set(part.weights)


def test_devices_of_a_layer_split_share_the_weights():
    two = ENGINE.model_copy(update={"quantization": "q4_k_m", "layer_split": 2})
    plan = plan_memory(MODEL, CARD, two)
    assert plan.num_devices == 2
    assert plan.weight_bytes == pytest.approx(42.5e9 / 2, rel=0.05)


def test_engines_without_host_layers_have_no_such_table():
    assert fits_of_types(MODEL, load_hardware("h100-sxm-80gb"), EngineSpec()) == []


def test_a_cpu_cannot_offload_layers_to_a_host():
    """Llama-3.1-70B has 75 GB in Q8_0 and 42.5 GB in Q4_K_M; the machine has 64 GB."""
    rows = {row.file_type: row for row in fits_of_types(MODEL, load_hardware("ryzen-9-7950x"), ENGINE)}
    assert (rows["q8_0"].layers, rows["q4_k_m"].layers) == (0, 81)
    assert {row.layers for row in rows.values()} == {0, 81}
