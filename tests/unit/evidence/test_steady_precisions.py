"""Number formats of recorded steady states: checkpoints as published, and formats that are not known."""

from pathlib import Path

from perfmodel.evidence.sources.steady import read_steady_states

HEADER = (
    "id,backend,backend_version,model_path,system,precision,isl,osl,lengths,concurrency,attention_tp,attention_dp,ep,"
    "mtp_unlabelled,ttft_ms,tpot_ms\n"
)


def test_int4_experts_are_served_as_their_checkpoint_has_them(tmp_path: Path) -> None:
    """Kimi-K2.5 by compressed-tensors: experts in 4 bits in groups of 32; attention and shared experts in 16, and so
    the activations and the KV cache."""
    path = tmp_path / "rows.csv"
    path.write_text(
        HEADER + "a,vllm,0.19.0,moonshotai/Kimi-K2.5,h200_sxm,int4,1024,64,uniform 0.8-1.0,4,8,1,1,False,100,10\n"
        "b,vllm,0.19.0,Qwen/Qwen3-32B,h200_sxm,int4,1024,64,uniform 0.8-1.0,4,1,1,1,False,100,10\n",
        encoding="utf-8",
    )
    (kimi, dense), left_out = read_steady_states(path)
    assert not left_out
    quantization = kimi.scenario.model.quantization
    assert (quantization.weights, quantization.group_size, quantization.activations) == ("int4", 32, None)
    assert {"attention", "shared_experts"} <= quantization.kept
    assert kimi.scenario.engine.kv_cache_dtype == "auto"
    assert dense.scenario.model.quantization.weights == "int4"


def test_a_precision_that_is_not_known_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = "a,vllm,0.19.0,Qwen/Qwen3-32B,h200_sxm,int7,1024,64,uniform 0.8-1.0,4,1,1,1,False,100,10\n"
    path.write_text(HEADER + row, encoding="utf-8")
    assert read_steady_states(path) == ([], [("a", "precision: got 'int7'; expected bf16, fp8, fp4, int4.")])
