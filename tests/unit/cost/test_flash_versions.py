"""Generations of FlashAttention: what each has been published to do differently, and where it does not exist."""

import pytest

from perfmodel.cost import step_costs
from perfmodel.errors import SpecError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.specs import load_scenario

BASE = {"a100-sxm-80gb": "llama-3.1-8b-a100", "h100-sxm-80gb": "llama-3.1-8b-h100-2048-256"}


def attention(hardware, version, prompts=1, tokens=2048, profile="vllm"):
    overrides = [f"engine.profile={profile}"]
    overrides += [] if version is None else [f"engine.flash_attn_version={version}"]
    shape = BatchShape(num_tokens=prompts * tokens, num_samples=prompts, prefills=((tokens, 0),) * prompts)
    rows = step_costs(load_scenario(BASE[hardware], overrides)).estimate(shape).rows
    return next(row for row in rows if row.name == "attention_prefill").time


@pytest.mark.parametrize("profile", ["vllm", "datasheet"])
def test_version_2_is_no_other_on_ampere_and_3_on_hopper(profile):
    for hardware, version in (("a100-sxm-80gb", 2), ("h100-sxm-80gb", 3)):
        assert attention(hardware, version, profile=profile) == attention(hardware, None, profile=profile)


@pytest.mark.parametrize("profile", ["vllm", "datasheet"])
def test_version_2_multiplies_at_two_thirds_on_hopper(profile):
    """Shah et al. 2024: mma.sync; the softmax beside the products does not change."""
    two, three = (attention("h100-sxm-80gb", version, profile=profile).compute_s for version in (2, 3))
    assert 1.2 < two / three <= 1.5 + 1e-9


@pytest.mark.parametrize("profile", ["vllm", "datasheet"])
def test_version_1_needs_many_heads_and_prompts(profile):
    """One block a head: 32 heads fill 32 of 108 units, 27 times as many of the same prompts fill them 8 times."""
    few, many = (
        attention("a100-sxm-80gb", 1, prompts, 512, profile).compute_s
        / attention("a100-sxm-80gb", 2, prompts, 512, profile).compute_s
        for prompts in (1, 27)
    )
    assert few > 1.5 * many
    assert many == pytest.approx(1, abs=0.35)


def test_version_1_moves_more_and_does_not_split_decodes():
    assert attention("a100-sxm-80gb", 1).memory_s > 2 * attention("a100-sxm-80gb", 2).memory_s
    shape = decode_shape(1, 8000)
    one, two = (
        step_costs(load_scenario("llama-3.1-8b-a100", [f"engine.flash_attn_version={v}"])).estimate(shape).device_s
        for v in (1, 2)
    )
    assert one > two


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["engine.flash_attn_version=3"], "on a100-sxm-80gb"),
        (["engine.flash_attn_version=2", "engine.attention=standard"], "with attention=standard"),
    ],
)
def test_where_a_version_is_not_it_is_refused(overrides, says):
    with pytest.raises(SpecError, match=says):
        load_scenario("llama-3.1-8b-a100", overrides)
