"""The files in deploy/ against what the emulator really exports, takes and answers.

Their schemas are checked by `benchmarks/deployment_files.py`.
"""

import inspect
import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from perfmodel.cli import app
from perfmodel.listening import serve_apps
from perfmodel.serve import Emulator
from perfmodel.serve.http.app import routes
from perfmodel.serve.metrics import Metrics
from perfmodel.serve.settings import ServerSettings
from perfmodel.specs import load_scenario

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FROM_SCRAPING = {"instance", "job", "namespace", "pod"}  # labels that Prometheus adds
ANY_LABEL = {"le"}
NAME = r"(?:vllm:|perfmodel_)[a-z0-9_:]+"


def read(name):
    return (DEPLOY / name).read_text(encoding="utf-8")


def yaml_of(name):
    return yaml.safe_load(read(name))


BOARD = json.loads(read("grafana/dashboards/emulator.json"))
ADAPTER = yaml_of("kubernetes/prometheus-adapter-values.yaml")["rules"]["custom"][0]
POD = yaml_of("kubernetes/deployment.yaml")["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
COMPOSE = yaml_of("compose.yaml")
QUERIES = [
    *(
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in BOARD["panels"]
        for target in panel["targets"]
    ),
    *((each["name"], each["query"]["query"], "") for each in BOARD["templating"]["list"] if each["type"] == "query"),
    *(
        (rule["alert"], rule["expr"], rule["annotations"]["summary"].replace("$labels.", ""))
        for rule in yaml_of("prometheus/rules.yml")["groups"][0]["rules"]
    ),
    ("HPA", ADAPTER["seriesQuery"], ""),
]


@pytest.fixture(scope="module")
def emulator():
    return Emulator(load_scenario("llama-3.1-8b-a100"))


@pytest.fixture(scope="module")
def exported(emulator):
    """What /metrics has before any request: sample name -> (type, names of its labels)."""
    found = {}
    for family in text_string_to_metric_families(Metrics(emulator, "m").render().decode()):
        for sample in family.samples:
            found[sample.name] = (family.type, set(sample.labels))
    return found


def metrics_in(query):
    return set(re.findall(NAME, query))


@pytest.mark.parametrize(
    ("title", "query", "legend"), QUERIES, ids=[f"{title}: {query}"[:60] for title, query, _ in QUERIES]
)
def test_what_a_query_reads_is_exported(exported, title, query, legend):
    names = metrics_in(query)
    assert names, query
    assert names <= set(exported), title
    labels = {label for selector in re.findall(r"\{(.*?)\}", query) for label in re.findall(r"(\w+)\s*[=!]", selector)}
    labels |= {label.strip() for by in re.findall(r"\bby \((.*?)\)", query) for label in by.split(",")}
    labels |= set(re.findall(r"label_values\(.*, (\w+)\)", query))
    labels |= {label.strip() for label in re.findall(r"\{\{(.*?)\}\}", legend)}
    for name in names:
        assert labels <= exported[name][1] | FROM_SCRAPING | ANY_LABEL, name


@pytest.mark.parametrize("query", [query for _, query, _ in QUERIES])
def test_counters_are_rated_and_gauges_are_not(exported, query):
    """The rate of a gauge means nothing, and a counter without one is its server's age."""
    rated = set(re.findall(rf"(?:rate|increase)\(({NAME})", query))
    for name in metrics_in(query):
        kind = exported[name][0]
        assert (name in rated) == (kind in ("counter", "histogram")), name


def test_the_dashboard_answers_what_it_is_for():
    """Percentiles of four latencies, queue and batch, KV, prefix hits, throughput, preemptions, the clock."""
    read_there = set().union(*(metrics_in(target["expr"]) for panel in BOARD["panels"] for target in panel["targets"]))
    for name in (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert f"vllm:{name}_bucket" in read_there
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_hits_total",
        "generation_tokens_total",
        "num_preemptions_total",
    ):
        assert f"vllm:{name}" in read_there
    assert "perfmodel_clock_slowed_seconds_total" in read_there


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)  # Grafana's columns


def test_the_autoscaler_reads_what_the_adapter_makes():
    (metric,) = yaml_of("kubernetes/autoscaler.yaml")["spec"]["metrics"]
    assert metric["type"] == "Pods"
    assert metric["pods"]["metric"]["name"] == ADAPTER["name"]["as"]
    assert ADAPTER["seriesQuery"].startswith("vllm:num_requests_waiting{")


# ---------------------------------------------------------------- what is started


def _dockerfile(word):
    return [
        line.removeprefix(word).strip()
        for line in read("Dockerfile").replace("\\\n", " ").splitlines()
        if line.startswith(f"{word} ")
    ]


def _defaults(text):
    """A compose file's `${NAME:-value}` as its value."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


COMMANDS = {
    "Dockerfile": json.loads(_dockerfile("CMD")[-1]),
    "compose.yaml": [_defaults(word) for word in COMPOSE["services"]["emulator"]["command"]],
    "deployment.yaml": CONTAINER["args"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_one(name):
    assert json.loads(_dockerfile("ENTRYPOINT")[-1]) == ["perfmodel", "serve"]
    serve = typer.main.get_command(app).commands["serve"]
    said = serve.make_context("serve", list(COMMANDS[name])).params
    assert said["host"] == "0.0.0.0"  # from a container, loopback is reached by nobody
    assert str(said["port"]) in " ".join(_dockerfile("EXPOSE"))


def test_what_is_asked_of_the_server_is_a_route(emulator):
    """Probes, the health check and the scrape."""
    known = {route.path for route in routes(emulator, ServerSettings(), None, None)}
    asked = {CONTAINER[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")}
    asked.add(POD["metadata"]["annotations"]["prometheus.io/path"])
    asked |= set(re.findall(r"http://127\.0\.0\.1:8000(/\w+)", read("Dockerfile")))
    assert {"/health", "/metrics"} < asked <= known


def test_ports_agree():
    port = _dockerfile("EXPOSE")[-1]
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": int(port)}]
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == port
    assert yaml_of("kubernetes/service.yaml")["spec"]["ports"][0]["targetPort"] == "http"
    (job,) = yaml_of("prometheus/prometheus.yml")["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"emulator:{port}"]
    assert "--allowed-host=emulator" in COMPOSE["services"]["emulator"]["command"]  # the Host that Prometheus sends


def test_labels_select_the_pods():
    labels = POD["metadata"]["labels"]
    assert yaml_of("kubernetes/deployment.yaml")["spec"]["selector"]["matchLabels"] == labels
    assert yaml_of("kubernetes/service.yaml")["spec"]["selector"] == labels


def test_the_service_monitor_selects_and_scrapes_the_service():
    monitor = yaml_of("kubernetes/servicemonitor.yaml")["spec"]
    service = yaml_of("kubernetes/service.yaml")
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["path"] == POD["metadata"]["annotations"]["prometheus.io/path"]


def test_a_pod_serves_until_proxies_have_removed_it():
    """The preStop delay and the drain of running requests fit into the termination grace period."""
    command, seconds = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = inspect.signature(serve_apps).parameters["drain_s"].default
    assert command == "sleep"
    assert 5 <= int(seconds) <= POD["spec"]["terminationGracePeriodSeconds"] - drain_s


def test_the_image_is_named_under_a_reserved_domain():
    """`example` is reserved (RFC 2606): nobody can publish an image under this name."""
    (image,) = yaml_of("kubernetes/kustomization.yaml")["images"]
    assert image["name"] == CONTAINER["image"] == "perfmodel-emulator"
    assert image["newName"].partition("/")[0].endswith(".example")


def test_nothing_runs_as_root_or_writes():
    user = _dockerfile("USER")[-1].partition(":")[0]
    assert int(user) > 0
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert POD["spec"]["securityContext"]["runAsUser"] == int(user)
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert COMPOSE["services"]["emulator"]["read_only"]
    assert all(service["cap_drop"] == ["ALL"] for service in COMPOSE["services"].values())


def test_compose_publishes_on_loopback_only():
    published = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_the_image_has_what_its_wheel_is_made_of():
    """Each source that pyproject.toml names is copied, and .dockerignore lets it through."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {
        *wheel["only-include"],
        "pyproject.toml",
        project["project"]["readme"],
        "tools/hatch_build.py",
    }
    copied = [word for line in _dockerfile("COPY") if "--from" not in line for word in line.split()[:-1]]
    let_through = [line[1:] for line in read("Dockerfile.dockerignore").splitlines() if line.startswith("!")]
    for path in wanted:
        assert any(path == each or path.startswith(f"{each}/") for each in copied), path
        assert any(path == each or path.startswith(f"{each}/") or fnmatch(path, each) for each in let_through), path
    extras = re.findall(r"perfmodel\[(.*?)\]", read("Dockerfile"))[0].split(",")
    assert set(extras) <= set(project["project"]["optional-dependencies"])
