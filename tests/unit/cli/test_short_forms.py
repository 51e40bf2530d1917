"""`--tp 4`, `--input 2k`: a short form equals one `--set`, and a conflict with another flag is refused."""

import json

import pytest

DENSE = ("--model", "tiny-llama", "--hardware", "h100")
FEW = ("--set", "traffic.num_requests=20")
FIXED = "{{distribution: fixed, value: {}}}"
SMALL = (
    *("--set", "plan.seeds=1", "--set", "plan.num_requests=60"),
    *("--set", "plan.space.max_num_seqs=[16]", "--set", "plan.space.max_num_batched_tokens=[2048]"),
)


def _without(text, keys):
    return {key: value for key, value in json.loads(text).items() if key not in keys}


@pytest.mark.release
@pytest.mark.parametrize(
    ("command", "short", "long"),
    [
        (("memory", *DENSE), ("--tp", "2"), ("engine.tensor_parallel_size=2",)),
        (("explain", "llama-3.1-8b-a100"), ("--pp", "2"), ("engine.pipeline_parallel_size=2",)),
        (
            ("explain", "--model", "mixtral-8x7b", "--hardware", "h200"),
            ("--dp", "2", "--ep"),
            ("engine.data_parallel_size=2", "engine.enable_expert_parallel=true"),
        ),
        (
            ("simulate", *DENSE, *FEW),
            ("--input", "2k", "--output", "2K"),
            (f"traffic.input_tokens={FIXED.format(2000)}", f"traffic.output_tokens={FIXED.format(2048)}"),
        ),
        (
            ("plan", *DENSE, "--rate", "2", "--ttft", "1s", *SMALL),
            ("--tp", "2", "--input", "200", "--output", "20"),
            (
                "plan.space.tensor_parallel_size=[2]",
                f"traffic.input_tokens={FIXED.format(200)}",
                f"traffic.output_tokens={FIXED.format(20)}",
            ),
        ),
    ],
)
def test_a_short_form_equals_its_long_form(run, command, short, long):
    by_flag = run(*command, *short, "--json")
    by_set = run(*command, *(part for text in long for part in ("--set", text)), "--json")
    assert by_flag.exit_code == by_set.exit_code == 0, by_flag.stderr + by_set.stderr
    assert by_flag.stdout == by_set.stdout
    assert by_flag.stdout != run(*command, "--json").stdout


def test_all_prompts_and_outputs_have_the_given_length(run):
    summary = json.loads(run("simulate", *DENSE, *FEW, "--input", "2k", "--output", "256", "--json").stdout)
    assert summary["total_input_tokens"] == 20 * 2000
    assert summary["total_output_tokens"] == 20 * 256
    assert "traffic azure" not in summary["notes"][0]  # no default length remains


def test_tensor_parallelism_takes_the_devices_left_by_the_other_sizes(run):
    """8 devices = TP x PP x DP: two stages leave TP 4."""
    for sizes, tp in ((("--pp", "2"), 4), (("--tp", "4", "--pp", "2"), 4), ((), 8)):
        by_size = run("memory", "--model", "llama-3.1-70b", "--hardware", "8xh100", *sizes, "--json")
        by_set = run(
            *("memory", "--model", "llama-3.1-70b", "--hardware", "h100", "--set", f"engine.tensor_parallel_size={tp}"),
            *("--set", f"engine.pipeline_parallel_size={8 // tp}", "--json"),
        )
        assert by_size.exit_code == 0, by_size.stderr
        explanations = ("notes", "provenance")
        assert _without(by_size.stdout, explanations) == _without(by_set.stdout, explanations)


def test_a_plan_of_a_server_uses_its_devices_and_the_given_size(run):
    result = run("plan", "--model", "tiny-llama", "--hardware", "4xh100", "--ttft", "1s", "--tp", "2", *SMALL, "--json")
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert {option["choices"]["engine.tensor_parallel_size"] for option in plan["ranked"]} == {2}
    assert plan["winner"]["gpus"] <= 4


def test_a_plan_of_several_devices_takes_one_price_per_device(run):
    flags = ("--rate", "2", "--ttft", "1s", "--tp", "1", *SMALL, "--json")
    devices = ("--model", "tiny-llama", "--hardware", "h100,gb200,mi300x")
    plan = json.loads(run("plan", *devices, *flags, "--price", "h100=5,gb200=4").stdout)
    by_device = {device["device"]: device for device in plan["devices"]}
    assert by_device["h100-sxm-80gb"]["usd_per_hour"] == 5 * by_device["h100-sxm-80gb"]["num_devices"]
    assert by_device["gb200"]["usd_per_hour"] == 4 * by_device["gb200"]["num_devices"]
    assert by_device["mi300x"]["usd_per_hour"] == 3  # the listed price
    unconfirmed = {row["label"].split(" x ")[1].split()[0]: row["has_unconfirmed_price"] for row in plan["ranked"]}
    assert unconfirmed == {"h100-sxm-80gb": False, "gb200": False, "mi300x": True}


def test_a_plan_marks_unconfirmed_prices_and_names_devices_without_one(run):
    devices = ("--model", "tiny-llama", "--hardware", "mi300x,h100,gb200")
    text = run("plan", *devices, "--rate", "2", "--ttft", "1s", "--tp", "1", *SMALL).stdout
    assert "3.00 USD/h (unconfirmed)" in text
    assert "3.00*" in text
    assert "4.76*" not in text
    assert "* an unconfirmed price" in text
    assert "no price of it is known: gb200" in text
    alone = run("plan", "--model", "tiny-llama", "--hardware", "gb200", "--rate", "2", "--ttft", "1s", *SMALL)
    assert "no price known" in alone.stdout
    assert "--price gb200=USD" in alone.stdout


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (
            ("memory", *DENSE, "--tp", "2", "--set", "engine.tensor_parallel_size=4"),
            "--tp 2 beside --set engine.tensor",
        ),
        (
            ("simulate", *DENSE, "--input", "9", "--set", "traffic.input_tokens.value=8"),
            "--input 9 beside --set traffic",
        ),
        (
            ("plan", *DENSE, "--tp", "2", "--set", "plan.space.tensor_parallel_size=[1]"),
            "--tp 2 beside --set plan.space",
        ),
        (("memory", "--model", "tiny-llama", "--hardware", "8xh100", "--tp", "4"), "got 4 devices of 8"),
        (("memory", "--model", "tiny-llama", "--hardware", "8xh100", "--pp", "3"), "got 3 devices of 8"),
        (("memory", "--model", "tiny-llama", "--hardware", "2xh100", "--pp", "4"), "got 4 devices of 2"),
        (("simulate", *DENSE, "--ep"), "no experts to share out"),
        (("plan", *DENSE, "--price", "b200=3"), "--hardware names no b200"),
        (("simulate", *DENSE, "--price", "h100="), "'h100' has no price"),
        (("simulate", *DENSE, "--price", "=2"), "no device has the price '2'"),
        (("simulate", *DENSE, "--price", "3", "--set", "price={usd_per_gpu_hour: 2}"), "--price 3 beside --set price="),
        (
            ("plan", *DENSE, "--tp", "2", "--set", "plan.space={tensor_parallel_size: [1]}"),
            "--tp 2 beside --set plan.space=",
        ),
        (("simulate", *DENSE, "--price", "-1"), "price.usd_per_gpu_hour: got -1; expected a number above 0"),
        (("simulate", "llama-3.1-8b-a100", "--price", "h1000=3"), "no device is called h1000"),
        (("simulate", *DENSE, "--traffic", "traced.yaml", "--input", "2k"), "got input_tokens beside a trace of csv"),
    ],
)
def test_a_conflicting_flag_is_refused(run, tmp_path, args, wanted):
    (tmp_path / "trace.csv").write_text("arrival,input,output\n0,10,5\n1,20,5\n")
    (tmp_path / "traced.yaml").write_text("trace: {path: trace.csv, format: csv}\n")
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert wanted in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_flag_applies_with_a_block_that_lacks_its_field(run):
    by_flag = run("memory", *DENSE, "--tp", "2", "--set", "engine={gpu_memory_utilization: 0.5}", "--json")
    by_set = run("memory", *DENSE, "--tp", "2", "--set", "engine.gpu_memory_utilization=0.5", "--json")
    assert _without(by_flag.stdout, {"provenance", "notes"}) == _without(by_set.stdout, {"provenance", "notes"})
