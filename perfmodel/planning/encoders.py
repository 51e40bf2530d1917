"""Encode pools in plans: the pool that a scenario has, and what its engines hold up, in closed form."""

from itertools import cycle, islice
from math import ceil
from typing import Any

from perfmodel.cost.calibrations.host_work import host_images
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape
from perfmodel.sim.fleet.encoding import feature_bytes
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.sim.traffic.workload import ImagePlan
from perfmodel.specs.cluster import PoolSpec
from perfmodel.specs.hardware import GivenLink
from perfmodel.specs.scenario import Scenario


def encode_pool(scenario: Scenario) -> PoolSpec | None:
    """The pool of encode replicas that the scenario has; None without. Raises SpecError for several."""
    pools = [pool for pool in scenario.pools if pool.role == "encode"]
    if len(pools) > 1:
        raise SpecError(f"got {len(pools)} encode pools; a plan sizes one, leave the others out.")
    return pools[0] if pools else None


def pool_fields(pool: PoolSpec, fixed: set[str]) -> dict[str, Any]:
    """`pool` as a file has it, without replicas. fixed: fields of its engine that it keeps whatever others have"""
    fields: dict[str, Any] = pool.model_dump(mode="json", include={"role", "name", "router"}, exclude_unset=True)
    engine = pool.engine.model_dump(mode="json", include=fixed | pool.engine.model_fields_set)
    return {**fields, "engine": engine, **({"hardware": pool.hardware.name} if pool.hardware else {})}


def processing_s(scenario: Scenario, num_servers: int, *, is_apart: bool = False) -> tuple[float, float]:
    """Seconds that a request's images, none of them cached, take of all `num_servers` API servers of `scenario`, and
    until idle ones have processed them. is_apart: each image is a request of its own"""
    work, images = host_images(scenario), scenario.traffic.images
    if work is None or images is None:
        return 0.0, 0.0
    shares, number = ImagePlan(scenario).shares, images.per_request
    decode_s, process_s = (float(shares @ [size[part] for size in work.sizes]) for part in (0, 1))
    requests, on_one = (number, ceil(number / num_servers)) if is_apart else (1, number)
    request_s = work.request_s + work.new_request_s
    decoded_s = decode_s * ceil(on_one / scenario.engine.media_loading_threads)
    alone_s = decoded_s + on_one * process_s + request_s * (on_one if is_apart else 1)
    return (requests * request_s + number * process_s) / num_servers, alone_s


def encoding_s(scenario: Scenario, count: int, ec_transfer: GivenLink) -> tuple[float, float]:
    """Seconds that a request's images take of all `count` encode engines of `scenario` in full steps, and until they
    are over the link with the engine that reads them if the encode engines idle."""
    plan, costs = ImagePlan(scenario), shared_step_costs(scenario)
    tokens, number = round(plan.mean_tokens / len(plan.grids)), len(plan.grids)
    together = max(1, scenario.engine.max_num_batched_tokens // max(tokens, 1))

    def step_s(images: int) -> float:
        grids = tuple(islice(cycle(plan.grids), images))
        return costs.estimate(BatchShape(images * tokens, images, ((tokens, 0),) * images, images=grids)).duration_s

    link, on_one = ec_transfer.link_of(scenario.hardware), ceil(number / count)
    moved_s = on_one * (link.latency_s + tokens * feature_bytes(scenario.model) / link.bandwidth_bytes_per_s)
    alone_s = step_s(min(on_one, together)) * ceil(on_one / together) + moved_s
    return number * step_s(together) / together / count, alone_s
