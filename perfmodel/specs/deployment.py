"""`Deployment`: pools that serve the same requests: unified ones behind a router, or prefill and decode ones."""

__all__ = ["Deployment", "completed", "deployments"]

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from perfmodel.specs.pool import PoolSpec


class Deployment(NamedTuple):
    """`pools`: the positions of its pools in the cluster; `share`: of the requests, all unless there is one."""

    name: str | None
    pools: tuple[int, ...]
    share: float | None
    is_shadow: bool
    is_disaggregated: bool

    def check(self, pools: Sequence[PoolSpec]) -> None:
        """Raise ValueError unless its pools, of the cluster's `pools`, make a deployment."""
        roles = Counter(pools[number].role for number in self.pools)
        where = "" if self.name is None else f" in deployment {self.name}"
        if bool(roles["prefill"]) != bool(roles["decode"]):
            missing = "decode" if roles["prefill"] else "prefill"
            raise ValueError(f"found no pool with role {missing}{where}; prefill and decode pools need each other")
        if roles["unified"] and roles["prefill"]:
            raise ValueError(
                f"found unified pools beside prefill and decode ones{where}; give each kind a `share` of the requests, "
                f"and a `deployment` name where there are several of a kind"
            )
        if self.is_shadow and self.share is None:
            raise ValueError(f"found shadow without share{where}; say of which share of the requests it gets copies")


def deployments(pools: Sequence[PoolSpec]) -> tuple[Deployment, ...]:
    """The deployments that `pools` make, in the order of their first pools."""
    return tuple(
        Deployment(
            name if isinstance(name, str) else None,
            tuple(numbers),
            pools[numbers[0]].share,
            pools[numbers[0]].shadow,
            any(pools[number].role == "prefill" for number in numbers),
        )
        for name, numbers in _grouped(pools).items()
    )


def completed(pools: Sequence[PoolSpec]) -> tuple[PoolSpec, ...]:
    """`pools`, each with the model, share and shadow of its deployment. Raises ValueError where two disagree."""
    complete = list(pools)
    for numbers in _grouped(pools).values():
        common: dict[str, Any] = {}
        for field in ("model", "share", "shadow"):
            said = [value for number in numbers if (value := getattr(pools[number], field))]
            if any(value != said[0] for value in said):
                raise ValueError(f"found more than one {field} in the pools of a deployment; give it once for all")
            common |= {field: said[0]} if said else {}
        for number in numbers if len(numbers) > 1 and common else ():
            complete[number] = pools[number].model_copy(update=common)
    return tuple(complete)


def _grouped(pools: Sequence[PoolSpec]) -> dict[str | int | None, list[int]]:
    groups: dict[str | int | None, list[int]] = {}
    for number, pool in enumerate(pools):
        is_alone = pool.deployment is None and pool.role == "unified" and pool.share is not None
        groups.setdefault(number if is_alone else pool.deployment, []).append(number)
    return groups
