"""Reads measured power of servers under a steady load: `energy.csv[.gz]`, a row per deployment and batch limit.

Columns: task, model, weight_precision, gpu, num_gpus, tp, ep, dp, max_num_seqs, engine ("vllm 0.11.1"), server_args,
avg_batch_size, avg_output_len, output_tokens_per_s, itl_p50_ms, power_w (of all GPUs), energy_per_output_token_j.
Lengths of prompts and sizes of images are not in the data."""

from pathlib import Path

from perfmodel.errors import SpecError
from perfmodel.evidence.observation import Entry, Observation, Reasons, described, lenient_rows, named, recorded_engine
from perfmodel.evidence.sources.setups import known_device, served_model
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Images, ImageSize, Lengths, Traffic

_NEEDED = ("task", "model", "gpu", "num_gpus", "dp", "avg_batch_size", "avg_output_len", "itl_p50_ms", "power_w")
# Mean prompts of the tasks' data sets [assumed: questions of chats and of exams, code around a gap].
_PROMPTS = {"lm-arena-chat": 250, "gpqa": 320, "sourcegraph-fim": 1200}
# Text beside one image of VisionArena-Chat, or 32 frames of a video of LLaVA-Video-178K, as the benchmark sends them
# (ml-energy/benchmark, mlenergy/llm/datasets.py), and their sizes: of a few usual ones, those nearest to the rows of
# qwen3-vl-8b on H100; all other rows are left out of that choice.
_IMAGES = {
    "image-chat": (90, ImageSize(width=1200, height=900)),
    "video-chat": (60, ImageSize(width=480, height=270, num_frames=32)),
}
_BUDGET = 8192  # --max-num-batched-tokens of all rows
_LONGEST_IMAGE = 16384


def read_energy_rows(path: str | Path) -> tuple[list[Observation], Reasons]:
    """(rows, (row, reason) of those left out). Metrics are of all devices: `power` in W, `tokens_per_s` and
    `energy_per_token` (J) of output tokens; `itl` in ms. Raises SpecError for another file."""
    return described(named(lenient_rows(path, _NEEDED, "measured power")), _row)


def _row(name: str, entry: Entry) -> Observation:
    task, batch, answer = entry["task"], float(entry["avg_batch_size"]), max(1, round(float(entry["avg_output_len"])))
    text, image = _IMAGES.get(task, (_PROMPTS.get(task), None))
    if text is None:
        raise SpecError(f"{task}: its prompts are not known.")
    hardware = known_device(entry["gpu"].lower())
    if hardware is None:
        raise SpecError(f"{entry['gpu']}: no such device.")
    devices, dp = int(entry["num_gpus"]), max(1, int(entry["dp"]))
    arguments = {
        "tensor_parallel_size": max(1, devices // dp),  # of attention; `tp` is the experts', which `ep` shares out
        "data_parallel_size": dp,
        "enable_expert_parallel": "--enable-expert-parallel" in entry["server_args"],
        "max_num_seqs": max(1, int(entry["max_num_seqs"])),
        "max_num_batched_tokens": _BUDGET,
        "max_model_len": text + 4 * answer + 64 + (_LONGEST_IMAGE if image else 0),
    }
    precision = entry["weight_precision"].replace("bfloat16", "bf16")
    model = served_model(entry["model"], precision).spec
    if image is not None and model.vision is None:
        raise SpecError(f"{entry['model']}: its encoder of images is not known.")
    profile, _, version = entry["engine"].partition(" ")
    scenario = Scenario(
        name=name,
        model=model,
        hardware=hardware,
        engine=recorded_engine(profile, version, hardware, arguments),
        traffic=Traffic(
            arrivals=Arrivals(process="closed_loop", concurrency=max(1, round(batch))),
            num_requests=max(1, round(batch)),
            input_tokens=Lengths(distribution="fixed", value=text),
            output_tokens=Lengths(distribution="fixed", value=answer),
            images=Images(sizes=(image,)) if image else None,
        ),
    )
    figures = {
        "itl": entry["itl_p50_ms"],
        "tokens_per_s": entry["output_tokens_per_s"],
        "power": entry["power_w"],
        "energy_per_token": entry["energy_per_output_token_j"],
    }
    metrics = {key: float(value) for key, value in figures.items()}
    return Observation(name, scenario, metrics, labels={"task": task, "devices": entry["num_gpus"]})
