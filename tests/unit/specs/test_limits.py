"""Nothing is a number, too: what may be zero, and what may not be less."""

import pytest
from pydantic import ValidationError

from perfmodel.specs.cluster import GatewaySpec, KvTransferSpec
from perfmodel.specs.engine.spec import EngineSpec

ZEROS = [
    (EngineSpec, "kv_cache_residual_tokens"),
    (EngineSpec, "long_prefill_token_threshold"),
    (KvTransferSpec, "latency_s"),
    (GatewaySpec, "max_queue"),
]


@pytest.mark.parametrize(("spec", "field"), ZEROS)
def test_none_at_all_is_allowed_and_less_is_refused(spec: type, field: str) -> None:
    assert getattr(spec.model_validate({field: 0}), field) == 0  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match=field):
        spec.model_validate({field: -1})  # type: ignore[attr-defined]
