"""Where only names are allowed, what would be looked for as a path is refused before the disk is asked for it."""

import json
from pathlib import Path

import pytest
from disk_record import recorded

from perfmodel.commands.catalog import HardwareShowRequest, ModelsShowRequest, answer_line
from perfmodel.commands.runs import CompareRequest, MemoryRequest
from perfmodel.commands.searches import PlanRequest, StudyRequest, WhatIfRequest
from perfmodel.cost import plan_memory
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.files.sandbox import is_allowed, restrict_paths
from perfmodel.planning.points import Point
from perfmodel.planning.space import Base, enumerate_space
from perfmodel.planning.spec import PlanSpec
from perfmodel.planning.sweep import sweep
from perfmodel.planning.typical_step import estimate_choice
from perfmodel.sim import simulate
from perfmodel.specs import load_scenario, schema

HOSTILE = (
    *("/etc/passwd", "../hostile.yaml", "~root/.ssh/hostile", "\\\\host\\hostile-share", "C:\\hostile"),
    *("/etc/hostile.json", "./hostile.gguf"),
)
BASE = {
    "model": "tiny-llama",
    "hardware": "a100-sxm-80gb",
    "traffic": {
        "num_requests": 2,
        "arrivals": {"process": "poisson", "rate": 1},
        "input_tokens": {"distribution": "fixed", "value": 16},
        "output_tokens": {"distribution": "fixed", "value": 4},
    },
}
SURELY_PATHS = {
    *("model", "hardware", "traffic", "engine.profile", "engine.calibration", "traffic.trace.path"),
    *("traffic.input_tokens.path", "traffic.output_tokens.path", "traffic.prompts", "cluster.network.link"),
    *("traffic.conversations.turns.path", "engine.speculative_config.model", "cluster.pools.0.hardware"),
    *("engine.speculative_config.acceptance.measured", "prompt_compression.model", "plan.space.hardware.0"),
}


# Read only beside what this walk leaves as it is: layers that stay with the CPU.
ELSEWHERE_PATHS = {"engine.cpu": ("engine", "cpu")}


def text_places(node, defs, place=(), seen=()):
    """Places in a scenario whose value can be any text, by its JSON Schema."""
    if "$ref" in node:
        name = node["$ref"].split("/")[-1]
        if name not in seen:
            yield from text_places(defs[name], defs, place, (*seen, name))
        return
    for each in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from text_places(each, defs, place, seen)
    if node.get("type") == "string" and not {"enum", "const"} & set(node):
        yield place
    for key, each in node.get("properties", {}).items():
        yield from text_places(each, defs, (*place, key), seen)
    for key, inner in ((0, "items"), ("any", "additionalProperties")):
        if isinstance(node.get(inner), dict):
            yield from text_places(node[inner], defs, (*place, key), seen)


def all_text_places():
    whole = schema("scenario")
    return sorted(set(text_places(whole, whole["$defs"])), key=str)


def scenario_with(place, value):
    """A scenario's text with `value` at a place; what stands around it is made where it is missing."""
    data = json.loads(json.dumps(BASE))
    around = data
    for key, following in zip(place, (*place[1:], None), strict=True):
        inner = value if following is None else [] if following == 0 else {}
        if isinstance(around, list):
            around.append(inner)
            around = around[0]
        else:
            kept = isinstance(around.get(key), type(inner)) and following is not None
            around[key] = around[key] if kept else inner
            around = around[key]
    return json.dumps(data)


def use(text):
    """All that reads what a scenario names: loading it, its memory, a step, a run, a plan's candidates."""
    scenario = load_scenario(text)
    if scenario.plan is not None:
        enumerate_space(Base(text), PlanSpec.model_validate(scenario.plan.model_dump(exclude_defaults=True)))
    plan_memory(scenario.model, scenario.hardware, scenario.engine)
    estimate_choice(scenario, 1, 16)
    simulate(scenario)


def touched_by(text, marker):
    """Whether using the scenario asks the disk for what has `marker` in its name, and the error that it ends in."""
    with recorded() as asked:
        try:
            use(text)
            error = None
        except (PerfmodelError, ValueError) as found:
            error = found
    return any(marker in each for each in asked), error


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def path_places(tmp_path_factory):
    """Places whose text the disk is asked for where files may be read."""
    probe = tmp_path_factory.mktemp("probe") / "probe-of-paths.yaml"
    return {
        ".".join(map(str, place)): place
        for place in all_text_places()
        if touched_by(scenario_with(place, str(probe)), probe.name)[0]
    }


def test_the_walk_finds_the_fields_that_are_paths(path_places):
    assert set(path_places) >= SURELY_PATHS


@pytest.mark.parametrize("hostile", HOSTILE)
def test_paths_are_refused_before_the_disk_is_asked(path_places, hostile):
    marker = hostile.replace("\\", "/").rpartition("/")[2]
    wrong = []
    for name, place in (path_places | ELSEWHERE_PATHS).items():
        with restrict_paths():
            is_touched, error = touched_by(scenario_with(place, hostile), marker)
        if is_touched or not isinstance(error, SpecError) or "names a file" not in str(error):
            wrong.append((name, is_touched, error))
    assert not wrong


def test_no_text_of_a_scenario_is_looked_for_on_the_disk():
    wrong = []
    for place in all_text_places():
        with restrict_paths():
            is_touched, _ = touched_by(scenario_with(place, "/etc/passwd"), "passwd")
        if is_touched:
            wrong.append(place)
    assert not wrong


@pytest.mark.release
@pytest.mark.parametrize("hostile", HOSTILE)
def test_answers_refuse_paths_as_names(hostile):
    marker = hostile.replace("\\", "/").rpartition("/")[2]
    given = {"model": "tiny-llama", "hardware": "h100"}

    def flags(**more):
        return tuple((given | more).items())

    def line(text):
        return lambda: answer_line(text, "line", Path(), {"hardware": "h100"})

    requests = [
        MemoryRequest(hostile),
        *(MemoryRequest(flags=flags(**{name: hostile})) for name in ("model", "hardware")),
        PlanRequest(flags=flags(traffic=hostile, rate="1", ttft="1s")),
        PlanRequest(flags=flags(hardware=f"h100,{hostile}", rate="1", ttft="1s")),
        WhatIfRequest(flags=flags(), vary=(f"model=tiny-llama,{hostile}",), workers=1),
        HardwareShowRequest(hostile),
        ModelsShowRequest(hostile),
        CompareRequest(hostile, "llama-3.1-8b-a100"),
        StudyRequest(hostile),
    ]
    lines = [line(f"vllm serve '{hostile}'"), line(f"vllm serve m --config '{hostile}'")]
    for ask in (*(request.answer for request in requests), *lines):
        with restrict_paths(), recorded() as asked, pytest.raises(SpecError):
            ask()
        assert not [each for each in asked if marker in each]


def test_stdin_is_no_scenario_of_a_page():
    with restrict_paths(), pytest.raises(SpecError, match="names a file"):
        MemoryRequest("-").answer()


def test_names_of_the_catalogue_are_as_before():
    scenario = load_scenario("llama-3.1-8b-a100")
    with restrict_paths():
        assert load_scenario("llama-3.1-8b-a100") == scenario
        assert load_scenario("executor/mixed").name
        assert load_scenario(json.dumps({**BASE, "model": "meta-llama/Llama-3.1-8B-Instruct"})).model


def test_uploaded_files_lie_below_an_allowed_folder(tmp_path):
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    (uploads / "lengths.txt").write_text("8\n16\n")
    lengths = {"distribution": "empirical", "path": str(uploads / "lengths.txt")}
    text = json.dumps({**BASE, "traffic": {**BASE["traffic"], "input_tokens": lengths}})
    with restrict_paths([uploads]):
        use(text)
    with restrict_paths(), pytest.raises(SpecError, match="names a file"):
        load_scenario(text)
    climbing = text.replace("uploads/lengths", "uploads/../../lengths")
    with restrict_paths([uploads]), pytest.raises(SpecError, match="names a file"):
        load_scenario(climbing)


def test_lengths_of_conversations_lie_beside_the_file_that_names_them(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "turns.txt").write_text("2\n")
    turns = {"distribution": "empirical", "path": "turns.txt"}
    traffic = {**BASE["traffic"], "conversations": {"turns": turns}}
    (tmp_path / "deep" / "mine.yaml").write_text(json.dumps({**BASE, "traffic": traffic}))
    found = load_scenario(tmp_path / "deep" / "mine.yaml").traffic.conversations
    assert found.turns.path == str(tmp_path / "deep" / "turns.txt")


def test_links_do_not_lead_out_of_an_allowed_folder(tmp_path):
    (tmp_path / "uploads").mkdir()
    (tmp_path / "secret.txt").write_text("8\n")
    link = tmp_path / "uploads" / "lengths.txt"
    link.symlink_to(tmp_path / "secret.txt")
    with restrict_paths([tmp_path / "uploads"]):
        assert not is_allowed(link)


def test_limits_end_where_they_began(tmp_path):
    file = tmp_path / "x"
    with restrict_paths():
        assert not is_allowed(file)
        with restrict_paths([tmp_path]):
            assert is_allowed(file)
        assert not is_allowed(file)
    assert is_allowed(file)
    assert is_allowed(Path("/etc/passwd"))


@pytest.mark.release
def test_worker_processes_have_the_limits_of_who_started_them(tmp_path):
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("8\n")
    text = json.dumps({**BASE, "traffic": {**BASE["traffic"], "num_requests": 1}})
    change = f"traffic.input_tokens={{distribution: empirical, path: {lengths}}}"
    points = [Point(text, ("mean_ttft_ms",), (change, f"seed={seed}")) for seed in range(2)]
    assert not sweep(points, workers=2)[0].problem
    with restrict_paths(), pytest.raises(SpecError, match="names a file"):
        sweep(points, workers=2)


def test_the_hub_is_not_asked(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    def refuse(*_, **__):
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.create_connection", refuse)
    with restrict_paths(), pytest.raises(SpecError, match="nothing is fetched here"):
        ModelsShowRequest("somebody/unheard-of").answer()


def test_the_cache_of_the_hub_is_read(monkeypatch, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 128, "vocab_size": 256, "torch_dtype": "bfloat16", "max_position_embeddings": 512}
    folder = tmp_path / "models--somebody--small" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with restrict_paths():
        assert ModelsShowRequest("somebody/small").answer().data["name"] == "somebody/small"
        with pytest.raises(SpecError, match="names a file"):
            ModelsShowRequest(str(folder / "config.json")).answer()
