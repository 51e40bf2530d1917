"""`perfmodel new "<line>" | perfmodel simulate -` for the lines that vLLM's recipes start servers with."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perfmodel import sim
from perfmodel.cli import app
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.specs import load_scenario

RECIPES: list[dict[str, Any]] = load_yaml(Path(__file__).with_name("recipes.yaml")).data["recipes"]
FEW = ("traffic.num_requests=3", "traffic.output_tokens={distribution: fixed, value: 4}")


@pytest.mark.parametrize("recipe", RECIPES, ids=[each["source"].partition(",")[0] for each in RECIPES])
def test_a_recipe_s_line_becomes_a_scenario_that_is_simulated(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Each field of the engine as the line has it, and no flag that is passed over in silence."""
    ran = CliRunner().invoke(app, ["new", recipe["text"], "--hardware", recipe["hardware"]])
    assert ran.exit_code == 0, ran.output
    file = tmp_path / "scenario.yaml"
    file.write_text(ran.stdout, encoding="utf-8")
    scenario = load_scenario(file, FEW)
    found = {name: getattr(scenario.engine, name) for name in recipe["engine"]}
    assert found == recipe["engine"]
    for name in recipe.get("unmodelled", []):
        assert name in ran.stderr
    assert ran.stderr.count("warning") == len(recipe.get("unmodelled", []))
    result = sim.simulate(scenario, keep_steps=False)
    assert result.to_json()["completed"] == 3
