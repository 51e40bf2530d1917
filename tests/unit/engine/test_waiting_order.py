"""SGLang's schedule policies by hand: in which order those that wait are looked at."""

from perfmodel.engine import Estimates, RadixKVBlocks, Request
from perfmodel.engine.admission import sort_waiting

SIZE = 4
RULES = Estimates(duplicate_tokens=8, most_sorted=10)


def tree(*prefixes: str) -> RadixKVBlocks:
    """Blocks whose tree has these prefixes, a letter a block."""
    blocks = RadixKVBlocks(100, SIZE)
    for number, contents in enumerate(prefixes):
        owner = request(1000 + number, contents)
        blocks.allocate(owner, owner.num_prompt_tokens)
        owner.num_computed_tokens = owner.num_prompt_tokens
        blocks.checkpoint(owner, owner.num_prompt_tokens)
        blocks.free(owner)
    return blocks


def request(number: int, contents: str, outputs: int = 5) -> Request:
    return Request(number, 0, SIZE * len(contents), outputs, tuple(contents))


def order(policy: str, waiting: list[Request], blocks: RadixKVBlocks, rules: Estimates = RULES) -> list[int]:
    sort_waiting(waiting, policy, blocks, rules)
    return [request.request_id for request in waiting]


def test_longest_answers_first() -> None:
    waiting = [request(number, "ab", outputs) for number, outputs in enumerate((3, 9, 5, 9))]
    assert order("lof", waiting, tree()) == [1, 3, 2, 0]


def test_longest_prefix_first_and_otherwise_as_they_came() -> None:
    """3, 0, 4 and 3 blocks of the prompts are in the tree."""
    waiting = [request(number, contents) for number, contents in enumerate(("abcx", "wxyz", "abcdx", "abcy"))]
    assert order("lpm", waiting, tree("abcdef")) == [2, 0, 3, 1]


def test_a_prompt_of_which_all_is_cached_still_computes_its_last_token() -> None:
    """Of two prompts of 4 blocks in a tree of 6, one is cached to the end: both have a prefix of 15 or 16 tokens, and
    the longer one goes first."""
    assert order("lpm", [request(0, "abcd"), request(1, "abcdx")], tree("abcdef")) == [1, 0]


def test_a_prompt_that_begins_as_another_one_waits_unless_much_of_it_is_cached() -> None:
    """SGLang: with at most `duplicate_tokens` (2 blocks) in the tree, who begins as another that waits comes last,
    behind prompts with nothing in the tree; with more it has its turn by its prefix."""
    waiting = [request(number, contents) for number, contents in enumerate(("xyz", "xyw", "q"))]
    assert order("lpm", waiting, tree()) == [0, 2, 1]
    waiting = [request(number, contents) for number, contents in enumerate(("abcx", "abcy", "q"))]
    assert order("lpm", waiting, tree("abc")) == [0, 1, 2]
    waiting = [request(number, contents) for number, contents in enumerate(("abx", "aby", "a"))]
    assert order("lpm", waiting, tree("ab")) == [0, 2, 1]


def test_more_requests_than_are_sorted_are_served_as_they_came() -> None:
    waiting = [request(number, contents) for number, contents in enumerate(("wxyz", "abcd", "abcx"))]
    assert order("lpm", waiting, tree("abcd"), Estimates(most_sorted=2)) == [0, 1, 2]


def test_by_subtree_the_child_with_most_requests_behind_it_comes_first() -> None:
    """Two branches below the root: one prompt behind `a`, three behind `x`, of which two behind `xz`."""
    contents = ("abq", "xyq", "xzq", "xzr")
    waiting = [request(number, text) for number, text in enumerate(contents)]
    assert order("dfs-weight", waiting, tree("ab", "xy", "xz")) == [2, 3, 1, 0]
