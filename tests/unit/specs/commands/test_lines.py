"""From command lines as people write them to what they say: quoting, variables, flags in all their forms, errors."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.specs.commands.line import Asking, LineScenario, read_line
from perfmodel.specs.commands.shell import Unresolved, read_shell

SERVE = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
ON_H100 = Asking(hardware="h100-sxm-80gb")
OFFLOADED = {"capacity_bytes": 16 * 2**30, "write_policy": "write_through", "load": "async"}  # a rank's share of 64 GiB


def read(text: str, asking: Asking = ON_H100) -> LineScenario:
    return read_line(text, asking)


def engine(text: str) -> dict[str, Any]:
    return dict(read(text).data.get("engine", {}))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("-tp 4", {"tensor_parallel_size": 4}),
        ("-tp=4", {"tensor_parallel_size": 4}),
        ("--tensor_parallel_size=4", {"tensor_parallel_size": 4}),
        ("--tensor-parallel 4", {"tensor_parallel_size": 4}),
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len 8K", {"max_model_len": 8192}),
        ("--max-model-len 1M", {"max_model_len": 2**20}),
        ("--max-model-len 25.6k", {"max_model_len": 25600}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no-enable_prefix_caching", {"enable_prefix_caching": False}),
        ("-O0", {"enforce_eager": True}),
        ("-O 0", {"enforce_eager": True}),
        ("-O3 --enforce-eager", {"enforce_eager": True}),
        ("-O3", {}),
        ("--compilation-config 3", {}),
        ("""--compilation-config '{"cudagraph_mode": "NONE"}'""", {"enforce_eager": True}),
        ("-cc.cudagraph_mode NONE", {"enforce_eager": True}),
        ("--dtype half", {"dtype": "float16"}),
        ("--quantization compressed-tensors", {}),
        ("-q fp8", {"quantization": "fp8"}),
        ("--all2all-backend naive", {"all2all_backend": "allgather_reducescatter"}),
        ("--kv-offloading-size 64 -tp 4", {"tensor_parallel_size": 4, "kv_offload": OFFLOADED}),
        (
            "--kv-offloading-size 64 -tp 2 -pp 2",
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "kv_offload": OFFLOADED},
        ),
        ("""--eplb-config '{"num_redundant_experts": 32}'""", {"eplb_config": {"num_redundant_experts": 32}}),
        ("--max-num-seqs 8 --max-num-seqs 16", {"max_num_seqs": 16}),
        ("--max_num_seqs='8'", {"max_num_seqs": 8}),
    ],
)
def test_flags_are_read_as_the_engine_s_own_parser_does(flags: str, expected: dict[str, Any]) -> None:
    """Human numbers: vLLM's documentation, k is 1,000 and K is 1,024. -O3 is as -O2, the default."""
    assert engine(f"{SERVE} {flags}") == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}', "ngram"),
        ('{"method": "eagle3", "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 2}', "eagle"),
        ('{"model": "meta-llama/Llama-3.2-1B-Instruct", "num_speculative_tokens": 5}', "draft_model"),
        ('{"method": "mtp", "num_speculative_tokens": 1}', "eagle"),
    ],
)
def test_speculation(config: str, expected: str) -> None:
    found = read(f"{SERVE} --speculative-config '{config}'")
    drafts = found.data["engine"]["speculative_config"]
    assert drafts["method"] == expected
    assert 0 < drafts["acceptance"]["rate"] < 1
    assert any("speculative_config.acceptance" in each for each in found.assumed)
    assert ("model" in drafts) == (expected == "draft_model")
    one_by_one = read(f"{SERVE} --spec-method ngram --spec-tokens 4 --speculative-config.prompt_lookup_max 3")
    assert one_by_one.data["engine"]["speculative_config"]["num_speculative_tokens"] == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{SERVE} --tensor-paralel-size 2", "Did you mean 'tensor-parallel-size'"),
        (f"{SERVE} --max-num 2", "It could be --max-num-batched-tokens"),
        (f"{SERVE} --max-num-seqs", "needs a value"),
        (f"{SERVE} --max-num-seqs --port 1", "needs a value"),
        (f"{SERVE} --max-num-seqs many", "got 'many'; expected a whole number"),
        (f"{SERVE} --max-model-len 1.5K", "expected a whole number"),
        (f"{SERVE} surplus", "got the word 'surplus'"),
        (f"{SERVE} --speculative-config '{{broken'", "expected JSON in quotes"),
        (f'{SERVE} --speculative-config \'{{"methd": "ngram"}}\'', "Did you mean 'method'"),
        (f"{SERVE} --max-num-seqs $(nproc)", "output of a command, and none is ever run"),
        (f"{SERVE} --max-num-seqs `nproc`", "output of a command, and none is ever run"),
        (f"{SERVE} --max-num-seqs $((2*N))", "arithmetic on more than whole numbers"),
        (f"{SERVE} --max-num-seqs $((2**64))", "arithmetic on more than whole numbers"),
        (f"{SERVE} --max-num-seqs $((1/0))", "arithmetic on more than whole numbers"),
        (f"{SERVE} --max-num-seqs $SEQS", "$SEQS is not set; put SEQS=... before"),
        ("vllm serve $MODEL", "$MODEL is not set"),
        (f"{SERVE} --max-num-seqs ${{SEQS//a/b}}", "is not read"),
        ("if [ $A = 1 ]; then\n N=1\nelse\n N=2\nfi\nvllm serve m --max-num-seqs $N", "set under a condition (line 4)"),
        (f"for n in 1 2; do\n{SERVE} --max-num-seqs $n\ndone", "takes 2 values in a loop (line 1)"),
        (f"{SERVE} --max-num-seqs 'open", "opened here and not closed"),
        (f"{SERVE} \\ \n --max-num-seqs 8", "backslash that goes on in the next line must be the line's last"),
        (f"{SERVE} --config serve.yaml", "no such file beside the line"),
        ("vllm chat", "unrecognized command"),
        ("", "unrecognized command"),
        ("vllm serve /models/llama-3.1-8b", "a path of the server's"),
        ("vllm serve --port 80", "names no model"),
        (f"{SERVE} -tp 2\n{SERVE} -tp 4", "a second server that differs"),
        ("vllm serve " + "x" * 200_001, "expected at most 200,000"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_with_its_line(text: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(text)
    message = str(caught.value)
    assert said in message
    assert message.startswith("line")
    assert "\n" not in message


def test_a_line_without_a_device_asks_for_one() -> None:
    with pytest.raises(SpecError, match="give --hardware"):
        read(SERVE, Asking())


def test_nothing_is_passed_over_in_silence() -> None:
    """Every flag of a line is a field, or is listed with those that have no part in time, or is warned of."""
    flags = {"--port": "80", "--max-num-seqs": "8", "--cpu-offload-gb": "4", "--seed": "1", "--fully-sharded-loras": ""}
    found = read(" ".join([SERVE, *(f"{name} {value}" for name, value in flags.items()), "--cpu-offload-gb 0"]))
    said = [*found.sources.values(), *found.irrelevant, *(what for what, _ in found.unmodelled)]
    for name in flags:
        assert any(name in each for each in said), name
    assert found.notes == ("--cpu-offload-gb 4 and then --cpu-offload-gb 0: the last counts",)
    assert [what for what, _ in found.unmodelled] == ["--fully-sharded-loras"]


def test_a_script_s_own_variables_files_and_wrappers() -> None:
    """Assignments, defaults, arrays, here-documents, exports, sudo, docker, `sh -c`."""
    script = """
    #!/bin/bash
    set -euo pipefail
    export HF_HOME="/data"; SIZE=${SIZE:-8}   # a comment 'with a quote
    MODEL="meta-llama/Llama-3.1-${SIZE}B-Instruct"
    FLAGS="--max-num-seqs 32 --port 80"
    MORE=(--block-size 32
          --no-enable-prefix-caching)
    cat > conf.yaml <<EOF
    gpu-memory-utilization: 0.8
    max_num_seqs: 1
    EOF
    CUDA_VISIBLE_DEVICES=0,1 nohup numactl --membind 0 vllm serve "$MODEL" $FLAGS "${MORE[@]}" \\
    --config conf.yaml > log 2>&1 &
    """
    found = read("\n".join(line.strip() for line in script.splitlines()))
    assert found.data["model"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert found.data["engine"] == {
        "gpu_memory_utilization": 0.8,
        "max_num_seqs": 32,
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    assert found.unmodelled == ()
    docker = "sudo docker run --gpus all -e VLLM_ALL2ALL_BACKEND=pplx vllm/vllm-openai:v0.14.1 --model a/b -dp 2"
    assert read(docker).data["engine"] == {
        "data_parallel_size": 2,
        "all2all_backend": "pplx",
        "version": "0.14.1",
    }
    inner = """docker run x bash -lc 'cd /w && vllm serve a/b -tp 2'"""
    assert engine(inner) == {"tensor_parallel_size": 2}
    module = "python3.12 -u -m vllm.entrypoints.openai.api_server --model a/b -tp 2"
    assert engine(module) == {"tensor_parallel_size": 2}
    assert engine("echo vllm serve c/d -tp 8\n/opt/venv/bin/vllm serve a/b -tp 2") == {"tensor_parallel_size": 2}
    assert engine("env A=b vllm serve a/b -tp 2") == {"tensor_parallel_size": 2}


def test_containers_of_a_compose_file_and_of_a_manifest() -> None:
    compose = """
services:
  web: {image: nginx}
  model:
    image: vllm/vllm-openai:v0.21.0
    environment: {HF_TOKEN: x, VLLM_USE_DEEP_GEMM: "1"}
    command: >
      --model meta-llama/Llama-3.1-8B-Instruct
      --tensor-parallel-size ${TP:-2} --hf-overrides '{"a": "$$x"}'
"""
    found = read(compose)
    assert found.data["engine"] == {"tensor_parallel_size": 2, "version": "0.21.0"}
    assert [what for what, _ in found.unmodelled] == ["--hf-overrides.a $x", "VLLM_USE_DEEP_GEMM=1"]
    manifest = """
kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: m
          image: vllm/vllm-openai:latest
          command: ["/bin/sh", "-c"]
          args: ["vllm serve a/b -tp 4"]
          env: [{name: HF_TOKEN, value: x}]
"""
    assert engine(manifest) == {"tensor_parallel_size": 4}
    with pytest.raises(SpecError, match=r"\$TP is not set"):
        read(compose.replace(":-2", ""))


DEPLOYMENT = """
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      %s
      containers:
        - image: vllm/vllm-openai:v0.21.0
          args: ["--model", "a/b", "--tensor-parallel-size", "2"]
          resources: {limits: {nvidia.com/gpu: %d}}
"""
AFFINITY = (
    "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
    "[{matchExpressions: [{key: nvidia.com/gpu.product, operator: In, values: [NVIDIA-H200]}]}]}}}"
)


@pytest.mark.parametrize(
    ("nodes", "device"),
    [("nodeSelector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}", "h100-sxm-80gb"), (AFFINITY, "h200-sxm")],
)
def test_where_a_manifest_runs_its_server_is_read(nodes: str, device: str) -> None:
    scenario = read_line(DEPLOYMENT % (nodes, 2), Asking(), "pod.yaml")
    assert scenario.data["cluster"] == {"replicas": 3}
    assert scenario.data["hardware"] == device
    assert not [note for note in scenario.notes if "GPUs" in note or "not read" in note]


@pytest.mark.parametrize("replicas", ["1e9", "1000000000", "-1", "1.5", ".inf", "-.inf", ".nan", "[1]", "three"])
def test_replicas_are_a_whole_number_in_range(replicas: str) -> None:
    manifest = (DEPLOYMENT % ("", 2)).replace("replicas: 3", f"replicas: {replicas}")
    with pytest.raises(SpecError, match=r"pod.yaml: replicas: got .*; expected a whole number up to 10,000"):
        read_line(manifest, Asking(hardware="h100-sxm-80gb"), "pod.yaml")


def test_what_of_a_manifest_does_not_fit_is_a_note() -> None:
    found = read_line(
        DEPLOYMENT % ("nodeSelector: {nvidia.com/gpu.product: NVIDIA-X1}", 4), Asking(hardware="h100-sxm-80gb")
    )
    assert found.data["hardware"] == "h100-sxm-80gb"
    assert "Not read: nodes with NVIDIA-X1, which is no device of hardware_specs" in found.notes
    assert "the manifest gives 4 GPUs to a server that uses 2" in found.notes


def test_pools_keep_the_replicas_of_their_manifests_and_hardware_given_replaces_theirs() -> None:
    role = """
kind: Deployment
spec:
  replicas: %d
  template:
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}
      containers:
        - image: vllm/vllm-openai:v0.21.0
          args: ["--model", "a/b", "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "%s"}']
"""
    pair = "---".join(role % each for each in ((3, "kv_producer"), (2, "kv_consumer")))
    found = read_line(pair, Asking(hardware="h100-sxm-80gb"), "pair.yaml")
    pools = [(pool["role"], pool["replicas"]) for pool in found.data["cluster"]["pools"]]
    assert pools == [("prefill", 3), ("decode", 2)]
    assert found.data["hardware"] == "h100-sxm-80gb"
    assert "hardware" not in found.sources
    assert "nodes with NVIDIA-H200: --hardware h100-sxm-80gb replaces it" in found.notes
    other = pair.replace("NVIDIA-H200", "NVIDIA-L40S", 1)
    with pytest.raises(SpecError, match="prefill and decode servers on different devices; give --hardware"):
        read_line(other, Asking(), "pair.yaml")


def test_groups_of_pods_and_replicas_of_compose() -> None:
    group = """
kind: LeaderWorkerSet
spec:
  replicas: 2
  leaderWorkerTemplate:
    size: 2
    workerTemplate:
      spec:
        containers:
          - image: vllm/vllm-openai:v0.21.0
            args: ["--model", "a/b", "-tp", "8", "-pp", "2"]
            resources: {limits: {nvidia.com/gpu: "8"}}
"""
    found = read(group)
    assert (found.data["cluster"], found.notes[:-1]) == ({"replicas": 2}, ())
    compose = """
services:
  llm:
    image: vllm/vllm-openai:v0.21.0
    command: --model a/b
    deploy: {replicas: 4, resources: {reservations: {devices: [{count: 1, capabilities: [gpu]}]}}}
"""
    assert read(compose).data["cluster"] == {"replicas": 4}
    with pytest.raises(SpecError, match="replicas: got 1000000000; expected a whole number up to 10,000"):
        read(compose.replace("4", "1000000000"))


def test_variables_of_containers() -> None:
    """Kubernetes replaces `$(NAME)`, and leaves `$NAME` to a shell; compose leaves it `$$NAME`."""
    manifest = """
kind: Pod
spec:
  containers:
    - image: vllm/vllm-openai:latest
      command: [%s]
      args: [%s]
      env: [{name: TP, value: "4"}, {name: MODEL, valueFrom: {secretKeyRef: {name: a, key: b}}}]
"""
    shell, alone = '"/bin/sh", "-c"', '"vllm", "serve"'
    four = {"tensor_parallel_size": 4}
    assert engine(manifest % (shell, '"vllm serve a/b -tp $TP"')) == four
    assert engine(manifest % (shell, '"SIZE=4\\nvllm serve a/b -tp $SIZE"')) == four
    assert engine(manifest % (shell, '"vllm serve a/b -tp $(TP)"')) == four
    assert engine(manifest % (alone, '"a/b", "-tp", "$(TP)"')) == four
    compose = "services:\n  x: {image: a, command: sh -c 'vllm serve a/b -tp $$TP', environment: [TP=4]}"
    assert engine(compose) == four
    for args, said in (
        ((shell, '"vllm serve $MODEL"'), r"\$MODEL is set elsewhere"),
        ((alone, '"$(MODEL)"'), r"\$\(MODEL\) is set elsewhere"),
        ((alone, '"a/b", "-tp", "$TP"'), r"\$TP is replaced by nobody"),
        ((alone, '"a/b", "-tp", "$(OTHER)"'), r"\$\(OTHER\) is replaced by nobody"),
        ((shell, '"vllm serve a/b -tp $(nproc)"'), "is the output of a command, and none is ever run"),
    ):
        with pytest.raises(SpecError, match=said) as raised:
            read(manifest % args)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ("vllm bench serve --dataset-name random-mm --random-mm-base-items-per-request 2", "per-request 2"),
        ("python -m sglang.bench_serving --dataset-name image --image-count 3", "--image-count 3"),
    ],
)
def test_images_of_a_load_test_are_warned_of(load: str, said: str) -> None:
    found = read(f"{SERVE} &\n{load} --request-rate 2")
    warned = dict(found.unmodelled)
    assert set(warned.values()) == {"images of the prompts; give traffic.images"}
    assert len(warned) == 2  # the data set, and what there is of it
    assert any(what.endswith(said) for what in warned)
    assert not any("image" in what or "mm" in what for what in found.irrelevant)


def test_equal_servers_and_pairs() -> None:
    """Equal ones are replicas; a producer and consumers of KV are pools; further nodes are the first server's ranks."""
    assert read(f"{SERVE} --port 1 &\n{SERVE} --port 2 &").data["cluster"] == {"replicas": 2}
    config = '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "%s"}\''
    roles = [config % role for role in ("kv_producer", "kv_consumer", "kv_consumer")]
    found = read("\n".join(f"{SERVE} -tp {tp} {role}" for tp, role in zip((1, 2, 2), roles, strict=True)))
    pools = found.data["cluster"]["pools"]
    assert [(each["role"], each["replicas"]) for each in pools] == [("prefill", 1), ("decode", 2)]
    assert [each["engine"]["tensor_parallel_size"] for each in pools] == [1, 2]
    for role in roles[:2]:
        with pytest.raises(SpecError, match=r"got 2 servers of role .* alone"):
            read(f"{SERVE} {role}\n{SERVE} {role}")
    ranks = read(f"{SERVE} -dp 4 -dpl 2\n{SERVE} -dp 4 -dpl 2 --headless -dpr 2")
    assert "cluster" not in ranks.data
    assert ranks.data["engine"] == {"data_parallel_size": 4}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--request-rate 4", {"process": "poisson", "rate": 4.0}),
        ("--request-rate 4 --burstiness 0.25", {"process": "gamma", "rate": 4.0, "cv": 2.0}),
        ("--max-concurrency 8", {"process": "closed_loop", "concurrency": 8}),
        ("--request-rate inf --max-concurrency 8", {"process": "closed_loop", "concurrency": 8}),
        ("", {"process": "burst"}),
    ],
)
def test_arrivals_of_a_load_test(flags: str, expected: dict[str, Any]) -> None:
    """vLLM's: gaps of a gamma distribution whose shape is the burstiness, so cv = 1 / sqrt(shape)."""
    found = read(f"{SERVE}\nvllm bench serve --num-prompts 50 {flags}").data["traffic"]
    assert found["arrivals"] == expected
    assert found["num_requests"] == 50


def test_lengths_of_a_load_test() -> None:
    """Random lengths are uniform within a ratio of their mean, and the prefix comes on top (get_sampling_params)."""
    bench = "vllm bench serve --dataset-name random --random-input-len 1000 --random-output-len 100"
    found = read(f"{SERVE}\n{bench} --random-range-ratio 0.1 --random-prefix-len 24").data["traffic"]
    assert found["input_tokens"] == {"distribution": "uniform", "low": 924, "high": 1124}
    assert found["output_tokens"] == {"distribution": "uniform", "low": 90, "high": 111}
    assert found["prefix"] == {"num_groups": 1, "shared_tokens": 24}
    limits = read(f"{SERVE}\n{bench} --goodput ttft:200 tpot:50").data["slo"]
    assert limits == {"ttft_ms": 200.0, "tpot_ms": 50.0}
    with pytest.raises(SpecError, match="give --traffic"):
        read(f"{SERVE}\nvllm bench serve --dataset-name custom")


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="vllm serve-=$(){}[]'\"`\\\n#<>&|;abA10 .:", max_size=60))
def test_any_text_is_read_or_refused_in_a_sentence(text: str) -> None:
    for each in (text, f"{SERVE} {text}"):
        with suppress(PerfmodelError):
            assert read(each).data["model"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$((2*8))", 16),
        ("$(( $N * 10 ))", 80),
        ("$((N+${N}*2))", 24),
        ("$(( (N - 1) / 2 ))", 3),
        ("$((-7 % 4 + 8))", 5),
        ("$((-7 / 2 + 20))", 17),  # towards zero
        ("$((7 / -2 + 20))", 17),
    ],
)
def test_arithmetic_on_whole_numbers(text: str, expected: int) -> None:
    """As C has it: division towards zero, remainders with the sign of what is divided."""
    assert engine(f"N=8\n{SERVE} --max-num-seqs {text}") == {"max_num_seqs": expected}


def test_nothing_is_run(tmp_path: Path) -> None:
    """Not by `$(...)`, backticks, here-documents, redirections or `sh -c`."""
    mark = tmp_path / "mark"
    text = f"A=$(touch {mark})\ntouch {mark}\necho x > {mark}\nsh -c 'touch {mark}'\n{SERVE} --port 1"
    assert read(text).data["model"].startswith("meta-llama")
    assert not mark.exists()


def test_words_are_split_as_a_shell_splits_them() -> None:
    """POSIX, 2.2 and 2.6.5: quotes hold words together, escapes hold a character, unquoted values are split."""
    text = """A="x  y"; p a\\ b 'c d'"e f" "$A" $A '$A' "\\$A" # $B\np ${B:-z} ${B-} "" end"""
    commands = read_shell(text).commands
    assert commands[0].words == ("p", "a b", "c de f", "x  y", "x", "y", "$A", "$A")
    assert commands[1].words == ("p", "z", "", "end")
    found = read_shell('p "$C-x"').commands[0].words[1]
    assert isinstance(found, Unresolved)
    assert found == "$C-x"


def test_variables_that_double_end_in_a_sentence() -> None:
    """Sixty doublings of one character would be 10^18."""
    script = "A=a\n" + "A=$A$A\n" * 60 + f"{SERVE} --max-model-len $A"
    with pytest.raises(SpecError, match="got a word that its variables make longer than 100,000 characters"):
        read(script)


def test_gpus_of_a_pod_are_its_limits_not_its_requests() -> None:
    """Kubernetes requires both to be equal, and allocates the limits."""
    manifest = DEPLOYMENT % ("nodeName: a", 4)
    both = manifest.replace("resources: {", "resources: {requests: {nvidia.com/gpu: 2}, ")
    assert read(both) == read(manifest)
    assert read(manifest) != read(DEPLOYMENT % ("nodeName: a", 2))


def test_drafts_of_a_method_that_is_not_modelled_are_left_out_and_named():
    flags = """--speculative-config '{"method": "custom_class", "num_speculative_tokens": 8}'"""
    found = read_line(f"vllm serve Qwen/Qwen3-8B {flags}", Asking(hardware="h100-sxm-80gb"))
    assert "speculative_config" not in found.data.get("engine", {})
    names = [what for what, _ in found.unmodelled]
    assert names == ["--speculative-config.method custom_class", "--speculative-config.num_speculative_tokens 8"]


def test_a_line_with_suffix_decoding_and_masks() -> None:
    """What shapes its drafts is read; what its trees hold is in the acceptance, and named."""
    drafts = """{"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.2}"""
    line = f"vllm serve Qwen/Qwen3-8B --speculative-config '{drafts}' --structured-outputs-config.backend guidance"
    found = read_line(line, Asking(hardware="h100-sxm-80gb"))
    engine = found.data["engine"]
    assert engine["speculative_config"]["suffix_decoding_max_spec_factor"] == 2.0
    assert engine["structured_outputs_config"] == {"backend": "guidance"}
    assert [what for what, _ in found.unmodelled] == ["--speculative-config.suffix_decoding_min_token_prob 0.2"]
