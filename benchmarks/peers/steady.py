"""What peers are asked of servers at a fixed concurrency: rows of measurements/steady-state as their arguments."""

import csv
import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments import Peer

Row = dict[str, str]
Answers = dict[str, list[float]]

AICONFIGURATOR = Peer("aiconfigurator-0.12.0", "ask_aiconfigurator.py", ("aiconfigurator==0.12.0",))
# Of Dynamo's own requirements, these are what its offline replay imports; its AIConfigurator has to answer to Python,
# which 0.12 does no more; pyarrow from 22 on needs another numpy than that.
REPLAY = Peer(
    "dynamo-1.2.1",
    "ask_replay.py",
    ("aiconfigurator==0.10.0", "pyarrow<22", "pydantic<=2.13", "uvloop", "msgspec"),
    ("ai-dynamo==1.2.1", "ai-dynamo-runtime==1.2.1"),
)
_REPOSITORIES = {"meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B", "zhipuai/GLM-5": "zai-org/GLM-5"}
_DENSE = ("Llama-3.1", "Qwen3-32B")
_PUBLISHED = {"gpt-oss": "fp4", "DeepSeek-V3": "fp8", "DeepSeek-R1": "fp8", "MiniMax": "fp8"}  # checkpoints' formats
_LEAST_SHARE = 0.8  # of nominal lengths that are drawn
_ROUNDS = 10  # of requests that the load tool sends through each slot
MAX_REPLAYED_ANSWER = 512  # tokens; a replay takes seconds to minutes a thousand steps


def read_table(file: Path) -> list[Row]:
    return list(csv.DictReader(gzip.decompress(file.read_bytes()).decode().splitlines()))


def _published_format(row: Row) -> str:
    """The number format of the checkpoint."""
    return _PUBLISHED.get(next(filter(row["model_path"].count, _PUBLISHED), ""), "bf16")


def _estimate(row: Row, as_published: bool) -> dict[str, Any]:
    """AIConfigurator's arguments for `row`; `as_published`: in the formats of the checkpoint."""
    gpus, ep, ranks = int(row["gpus"]), int(row["ep"]), int(row["attention_dp"])
    share = 1.0 if row["lengths"] == "fixed" else (1 + _LEAST_SHARE) / 2
    asked = {
        "model_path": _REPOSITORIES.get(row["model_path"], row["model_path"]),
        "system_name": row["system"],
        "backend_name": row["backend"],
        "isl": round(share * int(row["isl"])),
        "osl": round(share * int(row["osl"])),
        "batch_size": max(1, round(int(row["concurrency"]) / ranks)),
        "tp_size": int(row["attention_tp"]),
        "attention_dp_size": ranks,
    }
    if not any(name in row["model_path"] for name in _DENSE):
        asked |= {"moe_ep_size": ep, "moe_tp_size": gpus // ep}
    if not as_published and row["precision"] != "bf16":
        asked |= {"gemm_quant_mode": row["gemm_quant_mode"], "kvcache_quant_mode": "fp8"}
        asked |= {"moe_quant_mode": row["moe_quant_mode"]} if "moe_ep_size" in asked else {}
    return asked


def estimates(rows: Sequence[Row]) -> list[list[float] | str]:
    """[TTFT, TPOT] in ms of each of `rows` by AIConfigurator, or why there is none."""
    first = [_published_format(row) == row["precision"] != "bf16" for row in rows]
    return AICONFIGURATOR.answers(
        [[_estimate(row, own), _estimate(row, not own)] for row, own in zip(rows, first, strict=True)]
    )


def is_replayed(row: Row) -> bool:
    """Whether `row` can be stated to the replay: under vLLM (of SGLang's rows the second did not end, and took all
    memory), in the checkpoint's format, and soon done."""
    is_stated = row["backend"] == "vllm" and row["precision"] == _published_format(row)
    return is_stated and int(row["osl"]) <= MAX_REPLAYED_ANSWER


def _replay(row: Row) -> dict[str, Any]:
    ranks, ep = int(row["attention_dp"]), int(row["ep"])
    asked: dict[str, Any] = {
        "engine_type": row["backend"],
        "aic_backend": row["backend"],
        "aic_system": row["system"],
        "aic_tp_size": int(row["attention_tp"]),
        "aic_attention_dp_size": ranks,
        "aic_model_path": _REPOSITORIES.get(row["model_path"], row["model_path"]),
        "num_gpu_blocks": 200_000,  # more than any row fills
        "enable_prefix_caching": False,
        "max_num_seqs": 2048,
        "max_num_batched_tokens": 8192,
        "traffic": {
            "isl": int(row["isl"]),
            "osl": int(row["osl"]),
            "share": 1.0 if row["lengths"] == "fixed" else _LEAST_SHARE,
            "slots": max(1, round(int(row["concurrency"]) / ranks)),
            "rounds": _ROUNDS,
        },
    }
    if not any(name in row["model_path"] for name in _DENSE):
        asked |= {"aic_moe_ep_size": ep, "aic_moe_tp_size": int(row["gpus"]) // ep}
    return asked


def replays(rows: Sequence[Row]) -> list[list[float] | str]:
    """[TTFT, TPOT, TTFT and TPOT of the closed form of that release] in ms of each of `rows`, or why there is none."""
    return REPLAY.answers([_replay(row) for row in rows])
