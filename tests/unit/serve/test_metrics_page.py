"""docs/emulator-metrics.md lists every metric that there is, with its type, and none that there is not."""

import re
from pathlib import Path

from metrics_ledger import Page

from perfmodel.serve import Emulator
from perfmodel.serve.metrics import Metrics
from perfmodel.specs import load_scenario

PAGE = Path(__file__).parents[3] / "docs" / "emulator-metrics.md"
ALL = (
    "engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.6}}",
    "engine.kv_offload={capacity_bytes: 1.6e10, bandwidth_bytes_per_s: 2.0e10}",
    "cluster.replicas=2",
)
ROW = re.compile(r"^\| `([\w:]+)` \| (gauge|counter|histogram|summary) \| ([^|]*)\|", re.MULTILINE)
SHARED = {"model_name", "engine", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank", "le"}


def published(names):
    """(name, type) -> the labels that are not those of all, of each metric."""
    emulator = Emulator(load_scenario("llama-3.1-8b-a100", ALL))
    metrics = Metrics(emulator, "a/model", names, legacy=True, loras=("sql",))
    if metrics.http is not None:
        metrics.http.add("/v1/models", "GET", 200, (0, 100), 0.1)
    families = Page(metrics.render()).families
    return {
        (family.name, family.type): {label for sample in family.samples for label in sample.labels} - SHARED
        for family in families
    }


def test_the_page_lists_all_metrics():
    listed = {(name, kind): set(re.findall(r"`(\w+)`", text)) for name, kind, text in ROW.findall(PAGE.read_text())}
    found = published("vllm") | published("sglang")
    assert listed.keys() == found.keys()
    for key, labels in found.items():
        assert labels <= listed[key], f"{key}: {labels}"
        assert listed[key] - SHARED <= labels, f"{key}: {listed[key]}"
