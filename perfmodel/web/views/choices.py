"""What templates of the views that help to choose (what if, plan, techniques) take beside their answers."""

__all__ = ["CHOICES", "FILTERS"]

from collections.abc import Mapping
from typing import Any

from perfmodel.planning.metrics import study_metric
from perfmodel.planning.spec import PlanSpec
from perfmodel.web.pictures.choices import against_lines, bounds_plot, devices_bars, front_plot, tornado
from perfmodel.web.state import PageState
from perfmodel.web.views.bounded import is_preview
from perfmodel.web.views.plan import SERVICE_LEVELS, opened, priced_devices
from perfmodel.web.views.techniques import fields_of
from perfmodel.web.views.whatif import ALONG, ALTERNATIVES, WHATIF_METRICS

CHOICES: Mapping[str, Any] = {
    "against_lines": against_lines,
    "alternatives": ALTERNATIVES,
    "along": ALONG,
    "bounds_plot": bounds_plot,
    "devices_bars": devices_bars,
    "fields_of": fields_of,
    "front_plot": front_plot,
    "is_preview": is_preview,
    "metric_of": study_metric,
    "opened": opened,
    "plan_defaults": PlanSpec(),
    "priced_devices": priced_devices,
    "service_levels": SERVICE_LEVELS,
    "tornado": tornado,
    "whatif_metrics": WHATIF_METRICS,
}


def _used_in(fields: Mapping[str, str], state: PageState) -> bool:
    return bool(fields) and all(state.get(key) == value for key, value in fields.items())


FILTERS: Mapping[str, Any] = {"cleared": dict.fromkeys, "used_in": _used_in}
