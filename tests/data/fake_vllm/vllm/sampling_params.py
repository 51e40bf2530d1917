"""Parameters of a request."""

from enum import Enum


class RequestOutputKind(Enum):
    DELTA = 1


class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)
