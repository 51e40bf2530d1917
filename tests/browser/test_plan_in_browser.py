"""A plan in a browser, with the mouse alone: begun, answered, taken along, opened; and stopped."""

import time
from pathlib import Path
from urllib.parse import urlencode

import pytest
from browser_tab import Tab

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

import yaml

from perfmodel.specs import load_scenario

SMALL = {
    **{"plan.seeds": "1", "plan.num_requests": "60", "plan.finalists": "1", "plan.space.max_num_seqs": "[64]"},
    **{"plan.space.max_num_batched_tokens": "[8192]", "model": "llama-3.1-8b", "rate": "4"},
}
LIMITS = {"ttft": "1s", "tpot": "50ms"}


def address(**fields):
    return f"/plan?{urlencode({**SMALL, **fields})}"


@pytest.mark.release
def test_from_start_to_export(tab, tmp_path):
    tab.open(address(**LIMITS))
    tab.page.locator("label", has_text="h100-sxm-80gb").first.click()
    tab.page.locator("label", has_text="l40s").first.click()
    tab.page.wait_for_function("() => location.search.includes('l40s')")
    tab.finalize()
    assert not tab.figures()  # nothing is begun by an address
    tab.page.click("text=Find the deployment")
    tab.page.wait_for_selector(".card", timeout=240_000)  # takes seconds on an idle machine
    tab.finalize()
    shown = {path: value for path, value, _ in tab.figures()}
    assert float(shown["winner.max_rate"]) >= 4
    files = {}
    for link in tab.page.locator(".exports a[download]").all():
        with tab.page.expect_download() as begun:
            link.click()
        path = tmp_path / begun.value.suggested_filename
        begun.value.save_as(path)
        files[path.name] = path.read_text(encoding="utf-8")
    _exports_are_of(files, shown, tmp_path)
    tab.page.click("text=Open this deployment")
    tab.page.wait_for_function("() => location.pathname === '/deployment'")
    tab.finalize()
    assert {"weight_bytes", "duration_s"} <= {path for path, _, _ in tab.figures()}
    tab.check()


def _exports_are_of(files, shown, folder: Path):
    """The command, the scenario, the manifest and the report of one deployment."""
    assert "vllm serve" in files["serve.sh"]
    assert files["report.html"].startswith("<!doctype html>")
    kinds = {each["kind"] for each in yaml.safe_load_all(files["kubernetes.yaml"]) if each}
    assert {"Deployment", "Service"} <= kinds
    (name,) = (name for name in files if name.endswith("-planned.yaml"))
    scenario = load_scenario(folder / name)
    assert scenario.cluster.replicas * scenario.engine.num_devices == int(float(shown["winner.gpus"]))


LONG = {"plan.seeds": "8", "plan.num_requests": "3000", "plan.finalists": "8", "rate": "40"}


@pytest.mark.release
def test_a_plan_survives_a_reload_but_not_a_closed_tab(tab):
    path = address(**LIMITS, **LONG, hardware="h200-sxm")
    tab.open(path)
    tab.page.click("text=Find the deployment")
    tab.page.wait_for_selector(".progress")
    tab.page.reload()
    tab.page.wait_for_selector(".progress")
    tab.page.wait_for_timeout(12_000)  # longer than the grace period of a reload
    assert tab.page.query_selector(".progress")
    tab.page.close()
    other = Tab(tab.page.context, tab.server)
    until = time.monotonic() + 60
    while True:  # a plain request, since a page with scripts would wait for the plan
        html = other.page.request.get(tab.server.address + path).text()
        if "Find the deployment" in html and 'class="progress"' not in html:
            break
        assert time.monotonic() < until
        other.page.wait_for_timeout(500)
    other.check()


@pytest.mark.release
def test_what_is_begun_can_be_stopped(tab):
    tab.open(address(**LIMITS, **LONG, hardware="h100-sxm-80gb"))
    tab.page.click("text=Find the deployment")
    tab.page.wait_for_selector(".progress")
    tab.page.click("text=Stop")
    tab.page.wait_for_selector(".begin", timeout=120_000)
    assert "Stopped" in tab.page.inner_text(".begin")
    tab.check()
