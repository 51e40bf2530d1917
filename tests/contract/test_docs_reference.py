"""The generated pages of the reference are complete: what the code has, they have, with what it means."""

import json
import re
from functools import cache

import pytest
import typer
from pydantic import BaseModel

import perfmodel
from docs_site.accuracy_page import REPORTS, accuracy_page
from docs_site.cli_reference import cli_page
from docs_site.kernel_models_reference import fits_by_form, forms_page
from docs_site.metrics_reference import metrics_page
from docs_site.not_modelled_page import not_modelled_page
from docs_site.places import ROOT
from docs_site.python_reference import python_page
from docs_site.scenario_reference import scenario_page
from docs_site.tables import in_cell
from docs_site.techniques_gallery import techniques_table
from perfmodel.cli import app
from perfmodel.cost.kernel_models.registry import KERNEL_MODELS
from perfmodel.evidence.executed.technique import read_status
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.planning import metrics
from perfmodel.specs import schema

pytestmark = pytest.mark.release


@cache
def scenario_text():
    return scenario_page()


def rows_of(page, section):
    """The tables' rows below a heading, as cells."""
    text = re.split(r"^#{2,3} ", f"\n{page}".split(f"\n## {section}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in found]


def every_command(name, command):
    yield name, command
    for word in getattr(command, "commands", {}):
        yield from every_command(f"{name} {word}", command.commands[word])


def test_every_command_and_flag_is_there_with_its_meaning():
    page = cli_page()
    for name, command in every_command("perfmodel", typer.main.get_command(app)):
        rows = {row[0]: row for row in rows_of(page, name)}
        for parameter in command.params:
            if parameter.param_type_name == "option" and not parameter.hidden:
                row = next(row for flags, row in rows.items() if f"`{parameter.opts[0]}`" in flags.split(", "))
                assert row[-1], f"{name} {parameter.opts[0]} says nothing"


def test_every_field_of_a_scenario_is_there_with_a_type_and_a_meaning():
    """Of the objects that the JSON Schema reaches, each field."""
    page, found = scenario_text(), schema("scenario")
    listed = {"Scenario": found, **{k: v for k, v in found["$defs"].items() if "properties" in v}}
    for name, body in listed.items():
        rows = {row[0].strip("`"): row for row in rows_of(page, name)}
        assert rows.keys() == body["properties"].keys(), name
        assert not [f"{name}.{field}" for field, row in rows.items() if not row[1] or not row[-1]]


@pytest.mark.parametrize("kind", ["scenario", "traffic"])
def test_editors_are_told_what_each_field_means(kind):
    found = schema(kind)
    objects = [found, *found["$defs"].values()]
    fields = [(name, node) for each in objects for name, node in each.get("properties", {}).items()]
    assert len(fields) > 50
    assert not [name for name, node in fields if not node.get("description")]
    assert not [name for name, node in fields if len(node["description"]) < 5]


def test_defaults_and_units_are_those_of_the_schema():
    rows = {row[0].strip("`"): row for row in rows_of(scenario_text(), "PoolSpec")}
    assert rows["replicas"][3] == "`1`"
    slo = {row[0].strip("`"): row for row in rows_of(scenario_text(), "SLO")}
    assert slo["ttft_ms"][2] == "ms"
    arrivals = {row[0].strip("`"): row for row in rows_of(scenario_text(), "Arrivals")}
    assert arrivals["rate"][2] == "requests/s"
    assert arrivals["think_time_s"][2] == "s"


def test_no_meaning_is_of_a_field_that_is_gone():
    found = schema("scenario")
    fields = {"Scenario": found["properties"], **{k: v.get("properties", {}) for k, v in found["$defs"].items()}}
    meanings = load_yaml(ROOT / "perfmodel" / "specs" / "meanings.yaml").data
    gone = [f"{name}.{field}" for name, each in meanings.items() for field in each if field not in fields.get(name, {})]
    assert not gone


def test_every_metric_is_there():
    page = metrics_page()
    for basis, listed in metrics.metrics_by_basis().items():
        rows = {row[0].strip("`"): row for row in rows_of(page, basis.capitalize())}
        assert rows.keys() == {metric.key for metric in listed}
        assert all(rows[metric.key][2] == metric.unit for metric in listed)


def test_every_metric_that_the_emulator_documents_is_there():
    """The page written by hand is held to the server by a test of its own."""
    pytest.importorskip("prometheus_client", reason="the emulator's page is written with the extra `serve`")
    from docs_site.telemetry_reference import telemetry_page

    by_hand = (ROOT / "docs" / "emulator-metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([\w:]+)` \| (?:gauge|counter|histogram) \|", by_hand, re.MULTILINE))
    assert documented
    assert documented <= set(re.findall(r"^\| `([\w:]+)` \|", telemetry_page(), re.MULTILINE))


def test_every_public_name_of_the_package_is_there_with_its_docstring():
    page = python_page()
    for name in perfmodel.__all__:
        if name.startswith("__"):
            continue
        section = page.split(f"\n### {name}\n", 1)[1].split("\n### ", 1)[0]
        assert len(section.strip()) > 40, name
    assert "0x" not in page, "an address differs from build to build"


def test_every_form_is_there_with_its_formula_parameters_and_fits():
    page, fits = forms_page(), fits_by_form()
    for name, form in KERNEL_MODELS.items():
        section = page.split(f"\n## {name}\n", 1)[1].split("\n## ", 1)[0]
        assert re.search(r"^    \S", section, re.MULTILINE) or name == "on_host", f"{name} has no formula"
        assert issubclass(form.fit, BaseModel)
        for field in form.fit.model_fields:
            assert field in ("form", "residuals") or f"\n| `{field}` |" in section, f"{name}: {field}"
        assert section.count("\n| `") >= len(fits[name])


def test_every_fit_of_the_calibrations_is_counted():
    """Families in the files of devices, by an independent count of lines that begin one."""
    folder = ROOT / "hardware_specs" / "calibrations"
    named = sum(len(re.findall(r"^    form: ", path.read_text(), re.MULTILINE)) for path in folder.glob("*@*.yaml"))
    of_devices = [fit for each in fits_by_form().values() for fit in each if "/" in fit.family or "@" in fit.place]
    assert len([fit for fit in of_devices if not fit.family.startswith("backend ")]) >= named > 100


def test_every_technique_is_in_the_gallery():
    page = techniques_table()
    for row in read_status():
        assert in_cell(row.to_json()["technique"]) in page


def test_the_page_on_what_is_not_modelled_has_what_each_page_says_of_it():
    def without_targets(text: str) -> str:
        return re.sub(r"\]\([^)]*\)", "", text)

    page, missing = without_targets(not_modelled_page()), []
    for path in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "techniques").glob("*.md")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.lstrip("*").startswith("Not modelled"):
                text = line.lstrip("*").removeprefix("Not modelled").lstrip(".:* ")
                missing += [path.name] * (without_targets(text)[1:] not in page)  # but for its capital letter
    assert not missing
    assert "## Conversations: requests in turns" in page


def test_the_page_on_accuracy_has_every_report_with_its_worst_row():
    page = accuracy_page()
    for report in REPORTS:
        content = json.loads((ROOT / "reports" / f"{report.file}.json").read_text(encoding="utf-8"))
        section = page.split(f"\n### {report.title}\n", 1)[1].split("\n### ", 1)[0]
        worst = max(content["worst"], key=lambda row: abs(row["error"]))
        assert f"| {1 + worst['error']:.2f} |" in section, report.title
