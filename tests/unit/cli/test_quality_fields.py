"""What `quality --sensitivity --out` writes is what a scenario takes."""

import yaml

from perfmodel.commands.measurements import mixed_fields
from perfmodel.specs import load_scenario
from perfmodel_executors.quality.sensitivity import rules_of


def test_the_proposal_reads_back_as_the_same_rules(tmp_path):
    scenario = load_scenario("tiny-llama-cpu", ["engine.quantization=w8a16"])
    rules = tuple(rules_of([(0, None), (1, "attention")], "w4a16", 64))
    fields = yaml.safe_load(mixed_fields(scenario, rules))["engine"]
    again = load_scenario(
        "tiny-llama-cpu",
        [f"engine.{name}={yaml.safe_dump(v, default_flow_style=True)}".strip() for name, v in fields.items()],
    )
    assert again.engine.quantization_by_layer == rules
    assert yaml.safe_load(mixed_fields(scenario, ())) == {
        "engine": {"quantization": "w8a16", "quantization_by_layer": []}
    }
