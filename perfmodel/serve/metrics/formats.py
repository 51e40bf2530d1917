"""Formats of a page of metrics: which one a scraper asks for, and what it is called."""

__all__ = ["content_type", "wants_openmetrics"]

from prometheus_client import CONTENT_TYPE_LATEST

_OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def content_type(openmetrics: bool) -> str:
    """The Content-Type of a page in OpenMetrics' format, or in Prometheus's text."""
    return _OPEN if openmetrics else CONTENT_TYPE_LATEST


def wants_openmetrics(accept: str) -> bool:
    """Whether a request with this Accept header is to be answered in OpenMetrics' format: it names it, and not to say
    that it cannot read it (q=0)."""
    for part in accept.lower().split(","):
        media, *parameters = (each.strip() for each in part.split(";"))
        if media == _OPEN.partition(";")[0]:
            return not any(each and not each.strip("q=0. ") for each in parameters)
    return False
