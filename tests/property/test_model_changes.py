"""Any combination of model changes is simulated, or refused with one sentence."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario

_CHOICES = {
    "num_kv_heads": st.sampled_from([1, 2, 8, 5]),
    "latent": st.just({"kv_lora_rank": 128, "qk_rope_head_dim": 32}),
    "window": st.sampled_from([64, 1000]),
    "sparse": st.sampled_from([{"windows": 2}, {"fraction": 0.3}, {"pattern": "longformer", "windows": 4}]),
    "linear": st.sampled_from([{"kind": "performer"}, {"kind": "linformer", "size": 64}]),
    "ssm_layers": st.sampled_from([{}, {"attention_every": 4}]),
    "prune": st.sampled_from(
        [
            {"kind": "2:4"},
            {"kind": "layers", "fraction": 0.5},
            {"kind": "structured", "fraction": 0.4},
            {"kind": "unstructured", "fraction": 0.8, "storage": "sparse"},
        ]
    ),
    "low_rank": st.sampled_from([{"rank": 64}, {"fraction": 0.3, "components": ["attention"]}]),
    "moefy": st.just({"num_experts": 8, "top_k": 2}),
    "experts": st.sampled_from([{"top_k": 1}, {"split": 2}, {"num_experts": 16, "shared_intermediate_size": 512}]),
    "share_layers": st.sampled_from([1, 4, 5]),
    "tie_embeddings": st.booleans(),
    "early_exit": st.sampled_from([{"expected_share": 0.5}, {"expected_share": 0.8, "confidence": "softmax"}]),
}
_WINDOWS = st.fixed_dictionaries(
    {}, optional={"window_every": st.sampled_from([1, 2]), "sinks": st.sampled_from([0, 4])}
)


@st.composite
def changes(draw: st.DrawFn) -> dict[str, object]:
    names = draw(st.lists(st.sampled_from(sorted(_CHOICES)), unique=True, max_size=4))
    chosen = {name: draw(_CHOICES[name]) for name in names}
    return chosen | draw(_WINDOWS) if "window" in chosen else chosen


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes(),
    st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]),
    st.sampled_from([1, 2]),
    st.booleans(),
)
def test_any_combination_is_simulated_or_refused(
    tmp_path: Path, chosen: dict[str, object], model: str, tensor_parallel_size: int, is_fused: bool
) -> None:
    text = yaml.safe_dump(
        {
            "model": model,
            "hardware": "h100-sxm-80gb",
            "model_changes": chosen,
            "engine": {
                "tensor_parallel_size": tensor_parallel_size,
                "fused_kernels": is_fused,
                "max_model_len": 4096,
                "max_num_seqs": 16,
            },
            "traffic": {
                "arrivals": {"process": "burst"},
                "num_requests": 6,
                "input_tokens": {"distribution": "uniform", "low": 10, "high": 900},
                "output_tokens": {"distribution": "fixed", "value": 150},
            },
        }
    )
    path = tmp_path / "changed.yaml"
    path.write_text(text)
    try:
        result = simulate(load_scenario(path))
    except PerfmodelError as refusal:
        sentence = str(refusal)
    else:
        sentence = ""
        assert result.summary["completed"] == 6
        assert result.summary["duration"] > 0
    assert "\n" not in sentence
    assert sentence.endswith((".", "?")) or not sentence


@pytest.mark.parametrize(
    "chosen",
    [
        "early_exit.expected_share=0.5",
        "window=300",
        "linear.kind=performer",
        "sparse.fraction=0.3",
    ],
)
def test_steps_taken_together_last_as_long_as_one_by_one(chosen: str) -> None:
    settings_ = ["traffic.num_requests=40", f"model_changes.{chosen}"]
    scenario = load_scenario("llama-3.1-8b-a100", settings_)
    together, apart = simulate(scenario), simulate(scenario, can_leap=False)
    for name in ("mean_ttft_ms", "p99_tpot_ms", "std_e2el_ms", "duration", "kv_cache_usage_peak", "preemptions"):
        assert together.summary[name] == apart.summary[name]


def test_an_identical_change_gives_identical_answers() -> None:
    """All layers shared with themselves, all KV heads kept, nobody leaves."""
    few = ["traffic.num_requests=40"]
    nothing = [
        f"model_changes.{change}" for change in ("num_kv_heads=8", "share_layers=32", "early_exit.expected_share=1")
    ]
    assert simulate(load_scenario("llama-3.1-8b-a100", few + nothing)).summary == (
        simulate(load_scenario("llama-3.1-8b-a100", few)).summary
    )
