"""How large the package and the executor may be: raised only by a commit that says why."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Most lines (blank ones and docstrings counted), most files. Aims: 52,000 in 340, and 20,000 in 190; what binaries
# allow, text, ranks that die and engines' plug-ins went beyond the second, and deployment files of three engines,
# owning and carbon, shared links and measured points, and what to measure next 1,460 lines beyond where the first was.
# LoRA, images, tiers of KV, agents and rollouts, autoscalers' own rules, pooling, wide expert parallelism, and prompts
# that ranks share out, with this year's models, took 4,800 more; answers of a required shape, suffix decoding, beams,
# cores of the host, pools of encoders, feed-forward devices and acceptance by domain 1,400; images on the host, load of
# ranks under EPLB, front ends and ranks of separate workers, money on the page 700.
BUDGET = {"perfmodel": (80_370, 377), "executors/perfmodel_executors": (20_942, 141)}


@pytest.mark.parametrize("folder", BUDGET)
def test_a_package_stays_within_its_budget(folder: str) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")]
    most_lines, most_files = BUDGET[folder]
    assert sum(text.count("\n") for text in texts) <= most_lines
    assert len(texts) <= most_files
