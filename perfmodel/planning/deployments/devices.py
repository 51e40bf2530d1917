"""The best deployment of each device that a plan was asked about, or why it has none."""

__all__ = ["DeviceAnswer", "device_answers", "device_of", "with_every_device"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfmodel.planning.deployments.choice import Deployment, objective_key, shortfalls
from perfmodel.planning.deployments.finalist import Finalist
from perfmodel.planning.screening.screen import Screened
from perfmodel.planning.spec import PlanSpec


@dataclass(frozen=True)
class DeviceAnswer:
    """What a device that was asked for comes to.

    device:      as it was asked for
    label:       its best deployment; empty where nothing on it serves the rate
    usd_per_hour: of all its devices; None without a price
    max_rate:    requests per second within the SLO: simulated, else (`is_simulated`) as the closed form has it
    reason:      why there is none, or none better
    """

    device: str
    label: str = ""
    num_devices: int = 0
    usd_per_hour: float | None = None
    max_rate: float = 0.0
    is_simulated: bool = False
    reason: str = ""


def device_of(screened: Screened) -> str | None:
    """The device as the plan's space names it; None where it is the scenario's own."""
    return screened.candidate.layout.choices.get("hardware")


def with_every_device(chosen: Sequence[Deployment], serving: Sequence[Deployment], spec: PlanSpec) -> list[Deployment]:
    """`chosen`, where the best of a device that has none takes the last place of one that has several.

    serving: all deployments that serve the rate
    """
    found = list(chosen)
    for device in spec.space.hardware:
        mine = [each for each in serving if device_of(each.screened) == device]
        taken = [device_of(each.screened) for each in found]
        if not mine or device in taken:
            continue
        spare = [place for place, name in enumerate(taken) if place and taken.count(name) > 1]
        if spare:
            found[spare[-1]] = min(mine, key=lambda deployment: objective_key(deployment, spec))
    return found


def device_answers(
    spec: PlanSpec,
    rate: float,
    judged: tuple[Sequence[Finalist], Sequence[Finalist]],
    serving: Sequence[Deployment],
    screened: Sequence[Screened],
    ruled_out: Mapping[str, Mapping[str, int]],
) -> list[DeviceAnswer]:
    """An answer for each device of the space, in its order; none where it names fewer than two.

    spec:      what the plan asks for
    rate:      wanted, requests per second
    judged:    finalists that serve it, best first, and those that the simulator found not to
    serving:   deployments that serve it in closed form
    screened:  all candidates; ruled_out: device -> why others are none, and how many
    """
    if len(spec.space.hardware) < 2:
        return []
    return [_answer(device, spec, rate, judged, serving, screened, ruled_out) for device in spec.space.hardware]


def _answer(
    device: str,
    spec: PlanSpec,
    rate: float,
    judged: tuple[Sequence[Finalist], Sequence[Finalist]],
    serving: Sequence[Deployment],
    screened: Sequence[Screened],
    ruled_out: Mapping[str, Mapping[str, int]],
) -> DeviceAnswer:
    ranked, missed = ([one for one in each if device_of(one.deployment.screened) == device] for each in judged)
    if ranked:
        best = ranked[0]
        return DeviceAnswer(device, best.label, best.num_devices, best.usd_per_hour, best.rate, True)
    if missed:
        near = max(missed, key=lambda each: each.attained)
        return DeviceAnswer(
            device, reason=f"{near.label}, simulated, has {near.attained:.1%} of requests within the SLO"
        )
    mine = [each for each in serving if device_of(each.screened) == device]
    if mine:
        first = min(mine, key=lambda deployment: objective_key(deployment, spec))
        label = f"{first.replicas} x {first.screened.candidate.label}"
        return DeviceAnswer(device, label, first.num_devices, first.usd_per_hour, first.capacity)
    short = shortfalls([each for each in screened if device_of(each) == device], spec, rate)
    reasons = {**ruled_out.get(device, {}), **short}
    return DeviceAnswer(device, reason="; ".join(f"{count:,} {reason}" for reason, count in reasons.items()))
