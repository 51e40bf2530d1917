"""`GatewaySpec`: what stands between the clients and the replicas: limits, patience, retries."""

__all__ = ["GatewaySpec", "RateLimit", "Retries"]

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from perfmodel.specs.base import Spec
from perfmodel.specs.units import Seconds


class RateLimit(Spec):
    """A token bucket: `requests_per_s` on average, at most `burst` at once. What comes above it is refused."""

    requests_per_s: PositiveFloat
    burst: PositiveInt = 1


class Retries(Spec):
    """A request that was refused, or whose replica failed, is sent again at most `max` times.

    Before the n-th time it waits backoff_s x factor^(n-1) x (1 - jitter x u), u uniform in [0, 1): a jitter of 1 is
    what is called full jitter.
    """

    max: PositiveInt = 3
    backoff_s: Annotated[Seconds, Field(ge=0)] = 0.5
    factor: Annotated[float, Field(ge=1)] = 2.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.5


class GatewaySpec(Spec):
    """Limits and patience; each is without effect unless given.

    max_outstanding: requests that the replicas have in hand at most; what comes above it waits in the gateway, by
                     priority, if it still holds fewer than `max_queue`, and is refused if not
    timeout_s:       how long a client waits for the whole answer, retries included; what is left of it is aborted
    """

    rate_limit: RateLimit | None = None
    max_outstanding: PositiveInt | None = None
    max_queue: NonNegativeInt = 0
    timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    retries: Retries | None = None
