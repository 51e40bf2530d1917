"""Which blocks go to fewer bits: the cheapest per bit first, until the budget is met, and no further."""

import pytest

from perfmodel.errors import SpecError
from perfmodel_executors.quality.sensitivity import BlockLoss, choose_blocks, rules_of

# Four blocks of 100 weights, from 8 to 4 bits; the last one is twice as large and twice as costly: as cheap per bit.
BLOCKS = [
    BlockLoss((0, None), 0.5, 400.0),
    BlockLoss((1, None), 0.1, 400.0),
    BlockLoss((2, None), 0.02, 400.0),
    BlockLoss((3, None), 0.2, 800.0),
]


def chosen(budget):
    return choose_blocks(BLOCKS, 8.0, 500.0, budget)


def test_the_least_loss_per_bit_goes_first():
    assert chosen(8.0) == ()
    assert chosen(7.5) == ((2, None),)
    assert chosen(6.4) == ((2, None), (1, None))
    assert chosen(4.0) == ((2, None), (1, None), (3, None), (0, None))


@pytest.mark.parametrize("budget", [7.9, 7.0, 6.0, 5.0, 4.8, 4.0])
def test_the_budget_is_met_and_one_block_less_would_not_meet_it(budget):
    saved = {block.unit: block.bits_saved / 500 for block in BLOCKS}
    units = chosen(budget)
    assert 8 - sum(saved[unit] for unit in units) <= budget + 1e-9
    assert 8 - sum(saved[unit] for unit in units[:-1]) > budget


def test_a_budget_below_the_format_is_refused():
    with pytest.raises(SpecError, match=r"take 4\.000 bits a weight"):
        chosen(3.9)


def test_rules_name_layers_and_blocks():
    rules = rules_of([(3, "attention"), (1, "dense_ffn"), (2, "attention")], "w4a16", 64)
    assert [(rule.layers, rule.components) for rule in rules] == [((2, 3), ("attention",)), ((1,), ("dense_ffn",))]
    assert all((rule.quantization, rule.group_size) == ("w4a16", 64) for rule in rules)


def test_blocks_are_chosen_by_loss_per_saved_bit():
    """A loss of 0.4 for 1,600 bits is preferred to 0.2 for 400."""
    small, large = BlockLoss((0, None), 0.2, 400.0), BlockLoss((1, None), 0.4, 1600.0)
    assert choose_blocks([small, large], 8.0, 500.0, 4.8) == ((1, None),)
