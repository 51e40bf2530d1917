"""A recorded figure as steps of an engine: which engine at which version, and which steps its tokens took.

tg N            N steps of one token for each sequence, at the mean depth of depth + N / 2
pp N            a prompt of N tokens in steps of the engine's token budget
LocalScore      the mean of the rates over its nine shapes, of each the prompt and the generation (README of
                cjpais/localscore; a generation begins behind its prompt)
llama-server    generation behind a prompt of num_prompt tokens
several devices layers are split over them; pieces of a batch follow one another through the devices
"""

__all__ = ["LOCALSCORE_SHAPES", "Test", "local_engine", "local_scenario", "row_tests"]

import datetime
import re
from typing import NamedTuple

from perfmodel.calibrate.local.models import LocalModel
from perfmodel.calibrate.local.rows import LocalRow
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs.engine.description import load_engine_description
from perfmodel.specs.engine.devices import with_defaults
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic

# (prompt, generated) tokens
LOCALSCORE_SHAPES = (
    (1024, 16),
    (4096, 256),
    (2048, 256),
    (2048, 768),
    (1024, 1024),
    (1280, 3072),
    (384, 1152),
    (64, 1024),
    (16, 1536),
)
_USUAL_GENERATED = 128  # of a tool that does not say
_SHORT_PROMPT = 32  # in front of what such a tool generates
_BUILD = re.compile(r"\(b?(\d+)\)|^b?(\d{4,})$")
_KV_FORMATS = {"q8_0": "q8_0", "q4_0": "q4_0", "q5_1": "q5_1"}


class Test(NamedTuple):
    """Steps that are timed together; tokens: that they bring; a figure is the mean of the rates of its tests."""

    shapes: tuple[BatchShape, ...]
    tokens: int


def local_engine(row: LocalRow) -> EngineSpec:
    """The engine of a row, at the version that its build or its date stands for."""
    profile = "mlx" if row.backend == "mlx" else "llamacpp"
    given = {
        "profile": profile,
        "version": _version(profile, row),
        "backend": row.backend,
        "attention": None if row.flash is None else "flash" if row.flash else "standard",
        "kv_cache_dtype": _KV_FORMATS.get(row.kv_type, "auto"),
        "max_num_seqs": row.batch,
        "enable_prefix_caching": False,
    }
    if row.ubatch:
        given["ubatch_size"] = row.ubatch
    if row.num_devices > 1:
        is_tensor = row.backend_detail.upper().startswith("TP")
        given["tensor_parallel_size" if is_tensor else "layer_split"] = row.num_devices
    return EngineSpec.model_validate({name: value for name, value in given.items() if value is not None})


def local_scenario(row: LocalRow, model: LocalModel, hardware: HardwareSpec) -> Scenario:
    """What stands for the row wherever steps are priced."""
    lengths = Lengths(distribution="fixed", value=max(1, row.num_prompt))
    traffic = Traffic(
        arrivals=Arrivals(process="closed_loop", concurrency=row.batch),
        num_requests=row.batch,
        input_tokens=lengths,
        output_tokens=Lengths(distribution="fixed", value=max(1, row.num_generated)),
    )
    engine = with_defaults(local_engine(row), hardware)
    return Scenario(name=row.row_id, model=model.spec, hardware=hardware, engine=engine, traffic=traffic)


def row_tests(row: LocalRow, spans: tuple[int, ...], budget: int) -> list[Test]:
    """The tests whose mean rate the figure is.

    spans:  of the model's attention (`ModelSpec.attention_spans`); budget: tokens of a step
    """
    if row.tool == "localscore":
        pairs = LOCALSCORE_SHAPES
        if row.test == "pp":
            return [_prompt(prompt, 1, 0, budget) for prompt, _ in pairs]
        return [_decode(prompt + generated // 2, 1, spans) for prompt, generated in pairs]
    if row.test == "pp":
        return [_prompt(max(1, row.num_prompt), row.batch, row.depth, budget)]
    before = row.depth
    if not before and row.tool != "llama-bench":
        before = row.num_prompt or _SHORT_PROMPT
    return [_decode(before + (row.num_generated or _USUAL_GENERATED) // 2, row.batch, spans)]


def _decode(context: int, batch: int, spans: tuple[int, ...]) -> Test:
    return Test((decode_shape(batch, max(1, context), spans),), batch)


def _prompt(length: int, batch: int, depth: int, budget: int) -> Test:
    """Prompts of `batch` sequences one after another in steps of up to `budget` tokens."""
    shapes, grants, room = [], list[tuple[int, int]](), budget
    for _ in range(batch):
        done = 0
        while done < length:
            size = min(length - done, room)
            grants.append((size, depth + done))
            done, room = done + size, room - size
            if not room:
                shapes.append(_step(grants))
                grants, room = [], budget
    if grants:
        shapes.append(_step(grants))
    return Test(tuple(shapes), length * batch)


def _step(grants: list[tuple[int, int]]) -> BatchShape:
    return BatchShape(sum(new for new, _ in grants), len(grants), tuple(grants))


def _version(profile: str, row: LocalRow) -> str | None:
    """The described version at or before the row's build, or its date; the oldest for earlier ones."""
    versions = load_engine_description(profile).versions
    if not versions:
        return None
    build = _BUILD.search(row.build)
    if build is not None:
        number = int(build[1] or build[2])
        before = [text for text in versions if int(text.split(".")[0]) <= number]
    else:
        day = row.date or datetime.date.max
        before = [text for text, facts in versions.items() if facts.released is None or facts.released <= day]
    return before[-1] if before else next(iter(versions))
