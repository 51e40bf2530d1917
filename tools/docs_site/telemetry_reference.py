"""The page of what the emulator publishes at /metrics, read off its own pages."""

__all__ = ["published_families", "telemetry_page"]

from collections.abc import Iterable

from prometheus_client.core import Metric

from docs_site.tables import as_code, in_cell, table
from perfmodel.serve.emulator import Emulator
from perfmodel.serve.metrics import Metrics
from perfmodel.specs import load_scenario

_ALL = [
    "engine.speculative_config={method: ngram, num_speculative_tokens: 2, acceptance: {rate: 0.5}}",
    "engine.kv_offload={capacity_bytes: 16 GB, bandwidth_bytes_per_s: 20 GB/s}",
    "cluster.replicas=2",
]
_TITLES = {"vllm": "vLLM's names", "sglang": "SGLang's names"}
_OWN = "perfmodel_"


def telemetry_page() -> str:
    """What the page has below its introduction."""
    text, own = "", dict[str, Metric]()
    for names, title in _TITLES.items():
        result = published_families(names)
        own |= {item.name: item for item in result if item.name.startswith(_OWN)}
        text += f"## {title}\n\n{_table(item for item in result if not item.name.startswith(_OWN))}\n"
    return text + f"## The emulator's own\n\n{_table(own.values())}"


def published_families(names: str) -> list[Metric]:
    """All families of the page under these names, those that vLLM has given up among them."""
    emulator = Emulator(load_scenario("llama-3.1-8b-a100", _ALL))
    page = Metrics(emulator, "a-model", names, legacy=names == "vllm", loras=("adapter",))  # type: ignore[arg-type]
    return list(page.collect())


def _table(families: Iterable[Metric]) -> str:
    rows = [(as_code(family.name), family.type, _labels(family), in_cell(family.documentation)) for family in families]
    return table(("metric", "type", "labels", "what it is"), rows)


def _labels(family: Metric) -> str:
    names = {name: None for sample in family.samples for name in sample.labels if name != "le"}
    return " ".join(as_code(name) for name in names)
