"""How a step's work is shared out to the plans of a pipeline: nothing is lost, no plan has much more than its share."""

from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost.steps.stages import plans_of_round
from perfmodel.ops.work import BatchShape

prompts = st.lists(st.tuples(st.integers(2, 3000), st.integers(0, 3000)), max_size=6).map(tuple)


@given(prompts, st.integers(1, 500), st.integers(1, 4000), st.integers(2, 8), st.integers(1, 8))
def test_plans_have_all_of_the_steps_work_and_round_up_at_most_once_each(
    prefills: tuple[tuple[int, int], ...], decodes: int, context: int, ranks: int, num_plans: int
) -> None:
    new = sum(tokens for tokens, _ in prefills)
    shape = BatchShape(
        num_tokens=decodes + new,
        num_samples=decodes + len(prefills),
        prefills=prefills,
        num_decodes=decodes,
        decode_context=decodes * context,
        decode_windowed=(decodes * min(context, 128),),
        group_tokens=ranks * (decodes + new),
    )
    plans = plans_of_round(shape, num_plans)
    count = sum(plans.values())
    assert 1 <= count <= num_plans

    def total(name: str) -> int:
        return sum(getattr(plan, name) * times for plan, times in plans.items())

    assert sorted(p for plan, times in plans.items() for p in plan.prefills * times) == sorted(prefills)
    for name in ("num_tokens", "num_samples", "num_decodes", "decode_context"):
        assert getattr(shape, name) <= total(name) < getattr(shape, name) + 2 * count, name
    assert shape.decode_windowed[0] <= sum(plan.decode_windowed[0] * times for plan, times in plans.items())
    # Of the tokens of all ranks a plan has its share, by its own: the ranks' plans are alike.
    for plan in plans:
        assert 0 <= plan.group_tokens - ranks * plan.num_tokens <= 1
