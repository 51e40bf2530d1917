"""Whole runs with LoRA adapters: slots in memory, loads before steps, leaps, routing, and what is refused."""

import pytest

from perfmodel.cost import plan_memory
from perfmodel.cost.memory.adapters import adapter_load, slot_bytes
from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

# Per rank of Llama 3.1 8B: 32 layers of (3 x 4096 + 6144) + (4096 + 4096) + (2 x 4096 + 28672) + (14336 + 4096).
PER_RANK = 32 * 81_920
VOCABULARY = 2 * (128_256 + 4_096)


def scenario(*overrides: str) -> Scenario:
    few = ["traffic.num_requests=30", "traffic.arrivals.rate=4"]
    return load_scenario("llama-3.1-8b-h100-lora", [*few, *overrides])


def one_by_one(*overrides: str) -> Scenario:
    """Requests one after another, of 64 and 8 tokens, each with an adapter of two."""
    lone = ["traffic.arrivals={process: closed_loop, concurrency: 1}", "traffic.adapters={count: 2}"]
    lengths = [
        f"traffic.{name}={{distribution: fixed, value: {n}}}"
        for name, n in (("input_tokens", 64), ("output_tokens", 8))
    ]
    return scenario(*lone, *lengths, "engine.num_gpu_blocks_override=4000", *overrides)


@pytest.mark.parametrize(("tp", "elements"), [(1, PER_RANK), (2, 32 * (15_360 + 6_144 + 22_528 + 11_264))])
def test_slots_by_hand(tp: int, elements: int) -> None:
    own = scenario(f"engine.tensor_parallel_size={tp}")
    layers = list(own.model.iter_layers())
    assert slot_bytes(own.model, own.engine, layers, has_vocabulary=True) == 2 * 16 * (elements + VOCABULARY)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_large_adapter_is_copied_at_the_speed_of_the_link_a_part_to_each_rank(tp: int) -> None:
    """Rank 256 in 16 bits over an H100's 63 GB/s; ranks copy their parts at once, and each reads the whole file."""
    large = ("engine.max_lora_rank=256", "traffic.adapters.rank=256")
    load = adapter_load(scenario(f"engine.tensor_parallel_size={tp}", *large))
    assert load is not None
    assert load.from_host_s == pytest.approx(2 * 256 * PER_RANK / tp / 63e9)
    alone = adapter_load(scenario(*large))
    assert alone is not None
    assert load.from_disk_s == alone.from_disk_s


def test_slots_take_the_place_of_kv_blocks() -> None:
    """Each of 128 slots of rank 16: 92 MB, 44 blocks of 16 tokens x 131,072 bytes."""
    few, many = (scenario(f"engine.max_loras={count}", "traffic.adapters.count=1") for count in (1, 128))
    blocks = [plan_memory(own.model, own.hardware, own.engine).num_kv_blocks for own in (few, many)]
    assert blocks[0] - blocks[1] == pytest.approx(127 * 2 * 16 * (PER_RANK + VOCABULARY) / (16 * 131_072), abs=1)


def test_adapters_that_nobody_names_cost_memory_alone() -> None:
    same = ["engine.num_gpu_blocks_override=4000", "traffic.adapters=null"]
    with_slots = simulate(scenario(*same)).summary
    without = simulate(scenario(*same, "engine.enable_lora=false", "engine.max_loras=1")).summary
    assert with_slots["mean_ttft_ms"] == without["mean_ttft_ms"]
    assert with_slots["duration"] == without["duration"]


def test_a_step_waits_for_the_adapters_that_it_loads() -> None:
    """One slot for two adapters: each change of adapter is a load, from the host or, with room for one, the disk."""
    runs, notes = {}, {}
    for name, slots in {"none": (2, 2), "host": (1, 2), "disk": (1, 1)}.items():
        own = one_by_one(f"engine.max_loras={slots[0]}", f"engine.max_cpu_loras={slots[1]}")
        result = simulate(own)
        runs[name], notes[name] = (own, result.summary["duration"]), " ".join(result.notes)
    load = adapter_load(runs["host"][0])
    assert load is not None
    from_disk = runs["disk"][1] - runs["host"][1]
    assert f"{round(from_disk / load.from_disk_s)} of them from the disk" in notes["disk"]
    assert "loads of LoRA" not in notes["none"]
    assert from_disk / load.from_disk_s == pytest.approx(round(from_disk / load.from_disk_s), abs=1e-3)
    assert 8 <= round(from_disk / load.from_disk_s) <= 25


def test_loads_by_hand() -> None:
    """32 layers x 7 matrices x 2 thin ones, as queries, keys and values have their own: 448 copies, or 84 MB."""
    own = scenario()
    load = adapter_load(own)
    assert load is not None
    assert load.from_host_s == pytest.approx(max(448 * 1.924e-5, 2 * 16 * PER_RANK / 64e9), rel=1e-3)
    assert load.from_disk_s == pytest.approx(0.03206 + 2 * 16 * PER_RANK / 2.7835e9, rel=1e-3)
    assert load.step_s(2, 1) == pytest.approx(3 * load.from_host_s + load.from_disk_s)


@pytest.mark.parametrize("version", ["0.8", "0.30"])
def test_leaps_are_as_steps_one_by_one(version: str) -> None:
    """Fewer slots than adapters, so that requests wait and pass each other."""
    own = scenario(
        f"engine.version='{version}'", "engine.max_loras=2", "engine.max_cpu_loras=4", "traffic.adapters.count=8"
    )
    leaps, steps = simulate(own).summary, simulate(own, keep_steps=True, can_leap=False).summary
    assert {key: leaps[key] for key in ("duration", "mean_ttft_ms", "p99_e2el_ms")} == {
        key: steps[key] for key in ("duration", "mean_ttft_ms", "p99_e2el_ms")
    }


def test_requests_of_an_adapter_meet_where_it_is_loaded() -> None:
    """Eight adapters on four replicas of two slots: by adapter nothing is loaded twice, at random most are."""
    ttft = {}
    for router in ("lora_affinity", "random"):
        own = scenario(
            *("cluster.replicas=4", f"cluster.router={router}", "engine.max_loras=2", "engine.max_cpu_loras=2"),
            *("traffic.adapters={count: 8}", "traffic.num_requests=200", "traffic.arrivals.rate=10"),
        )
        ttft[router] = simulate(own).summary["mean_ttft_ms"]
    assert ttft["lora_affinity"] < 0.7 * ttft["random"]


def test_blocks_of_the_prefix_cache_belong_to_one_adapter() -> None:
    """All prompts begin alike: of eight adapters' first requests none finds anything, else but the very first does."""
    same = ["engine.enable_prefix_caching=true", "traffic.prefix={shared_tokens: 256}", "traffic.arrivals.rate=0.5"]
    hits = []
    for adapters in ("{count: 1}", "{count: 8}"):
        hits.append(simulate(scenario(*same, f"traffic.adapters={adapters}")).summary["prefix_cache_hit_rate"])
    assert 0 < hits[1] < 0.9 * hits[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine.enable_lora=false", "engine.max_loras=1"], "traffic.adapters without engine.enable_lora"),
        (["engine.enable_lora=false"], "max_loras without enable_lora"),
        (["engine.max_cpu_loras=8"], "expected at least max_loras=128"),
        (["traffic.adapters.rank=32"], "expected at most engine.max_lora_rank=16"),
        (["engine.profile=sglang", "engine.version=null"], "are not described"),
        (["model=qwen3-30b-a3b"], "adapters of experts are not modelled"),
        (["model=gemma-3-4b"], "vocabularies up to 258,048 tokens"),
        (["engine.pipeline_parallel_size=2"], "not modelled together"),
        (["engine.speculative_config={method: ngram, num_speculative_tokens: 2}"], "not modelled together"),
        (["traffic.adapters={count: 3, shares: [1, 2]}"], "expected one for each"),
        (["traffic.adapters={count: 2, shares: [1, 2], zipf: 1}"], "leave one of them out"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(overrides: list[str], words: str) -> None:
    with pytest.raises(PerfmodelError, match=words):
        scenario(*overrides)


def test_attention_alone_of_a_mixture_may_have_adapters() -> None:
    named = "engine.lora_target_modules=[qkv_proj, o_proj]"
    own = scenario("model=qwen3-30b-a3b", named, "traffic.num_requests=3", "engine.gpu_memory_utilization=0.95")
    assert simulate(own).summary["completed"] == 3
