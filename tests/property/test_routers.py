"""Laws of routers: each chooses as its rule says, whoever comes and goes, and never looks at all targets."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.engine import Request
from perfmodel.sim.fleet import routing
from perfmodel.sim.fleet.routing import ROUTERS, PowerOfTwo, RandomChoice, SessionAffinity


@dataclass
class Server:
    """A target that requests come to and leave."""

    index: int
    block_size: int = 16
    num_outstanding: int = 0
    num_prompt_blocks: int = 0
    num_looks: int = 0
    watchers: list[Callable[[int], None]] = field(default_factory=list)

    def watch(self, on_less: Callable[[int], None]) -> None:
        self.watchers.append(on_less)

    def add(self, num_blocks: int) -> None:
        self.num_outstanding += 1
        self.num_prompt_blocks += num_blocks

    def drop(self, num_blocks: int) -> None:
        self.num_outstanding -= 1
        self.num_prompt_blocks -= num_blocks
        for watcher in self.watchers:
            watcher(self.index)


def request(number: int, session: int | None = None, prefix: int | None = None) -> Request:
    made = Request(number, 0, 64, 1, () if prefix is None else ((prefix, 0), (prefix, 1)))
    made.session = session
    return made


# (what happens, to whom): a request of so many blocks comes or goes, or a server joins or leaves.
moves = st.lists(st.tuples(st.sampled_from(["send", "send", "send", "drop", "fleet"]), st.integers(0, 9)), max_size=80)


@given(st.sampled_from(["least_outstanding", "least_kv"]), st.integers(1, 6), moves)
def test_the_least_loaded_is_the_one_that_a_scan_finds(
    name: str, count: int, happenings: list[tuple[str, int]]
) -> None:
    servers = [Server(i) for i in range(count)]
    router, live, held = ROUTERS[name](servers), list(servers), []
    for number, (what, whom) in enumerate(happenings):
        if what == "send" and live:
            chosen = router(request(number))
            load = (lambda s: s.num_outstanding) if name == "least_outstanding" else (lambda s: s.num_prompt_blocks)
            assert chosen is min(live, key=lambda s: (load(s), s.index))
            chosen.add(whom)
            held.append((chosen, whom))
        elif what == "drop" and held:
            server, num_blocks = held.pop(whom % len(held))
            server.drop(num_blocks)
        elif what == "fleet":
            server = servers[whom % count]
            if server in live:
                router.leave(server)
                live.remove(server)
            else:
                router.join(server)
                live.append(server)


@given(st.sampled_from(sorted(ROUTERS)), st.integers(2, 8), st.integers(0, 2**40))
def test_who_has_left_gets_nothing_until_it_is_back(name: str, count: int, seed: int) -> None:
    servers = [Server(i) for i in range(count)]
    router = ROUTERS[name](servers, seed)
    router.leave(servers[1])
    assert all(router(request(number, number % 7)) is not servers[1] for number in range(50))
    for server in servers[:1] + servers[2:]:
        router.leave(server)
    router.join(servers[1])
    assert all(router(request(number, number % 7)) is servers[1] for number in range(50))


@given(st.sampled_from(sorted(ROUTERS)), st.integers(1, 5), moves, st.integers(0, 2**40))
def test_only_those_that_are_there_get_requests(
    name: str, count: int, happenings: list[tuple[str, int]], seed: int
) -> None:
    """Whatever a router remembers of prompts and sessions, from before a server left or from before it came back."""
    servers = [Server(i) for i in range(count)]
    router, live, held = ROUTERS[name](servers, seed), list(servers), []
    for number, (what, whom) in enumerate(happenings):
        if what == "send" and live:
            chosen = router(request(number, whom % 3 or None, None if whom == 9 else whom % 4))
            assert chosen in live
            chosen.add(1)
            held.append(chosen)
        elif what == "drop" and held:
            held.pop(whom % len(held)).drop(1)
        elif what == "fleet":
            server = servers[whom % count]
            (router.leave if server in live else router.join)(server)
            (live.remove if server in live else live.append)(server)


def test_prompts_that_begin_alike_go_where_the_first_went_until_it_leaves() -> None:
    """The home of a prefix is the server that was least loaded when it came; another is found when that one has left,
    and stays one when the first is back: its cache has gone with it."""
    servers = [Server(0, num_outstanding=1), Server(1), Server(2, num_outstanding=2)]
    router = ROUTERS["prefix_affinity"](servers)
    assert router(request(0, prefix=7)) is servers[1]
    servers[1].add(5)
    assert router(request(1, prefix=7)) is servers[1]
    assert router(request(2, prefix=8)) is servers[0]
    router.leave(servers[1])
    assert router(request(3, prefix=7)) is servers[0]
    router.join(servers[1])
    assert router(request(4, prefix=7)) is servers[0]


@pytest.mark.parametrize("name", ["prefix_affinity", "session_affinity"])
def test_a_block_that_ends_in_the_answer_is_nobodys_beginning(name: str) -> None:
    """A prompt of less than a block has no block that a router could know; what follows holds its answer."""
    servers = [Server(i) for i in range(64)]
    known, unknown = ROUTERS[name](servers, 1), ROUTERS[name](servers, 1)
    for number in range(50):
        short = Request(number, 0, 15, 40, (("answered", number), ("more", number)))
        chosen = known(short)
        assert chosen is unknown(Request(number, 0, 15, 40))
        chosen.add(1)


def test_a_router_forgets_the_beginnings_that_were_used_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three for each of two servers, seven are too many: the one that was not used again is unknown then."""
    monkeypatch.setattr(routing, "_MAX_HOMES", 3)
    servers = [Server(0), Server(1, num_outstanding=1)]
    router = ROUTERS["prefix_affinity"](servers)
    assert {router(request(number, prefix=number)).index for number in range(6)} == {0}
    servers[0].add(9)
    servers[0].add(9)
    assert router(request(6, prefix=0)) is servers[0]
    assert router(request(7, prefix=99)) is servers[1]
    assert [router(request(8 + prefix, prefix=prefix)).index for prefix in (0, 2, 3, 1)] == [0, 0, 0, 1]


@pytest.mark.parametrize("make", [RandomChoice, SessionAffinity, PowerOfTwo])
def test_chance_is_fair_and_repeats_itself(make: type[RandomChoice[Server]]) -> None:
    """Each of 8 gets an eighth: within 4 standard errors for independent draws, within 4 / sqrt(128) on a ring."""
    servers = [Server(i) for i in range(8)]
    routers = [make(servers, seed) for seed in (3, 3, 4)]
    shares = [Counter(router(request(n)).index for n in range(20_000)) for router in routers]
    assert shares[0] == shares[1]
    assert shares[0] != shares[2]
    tolerance = 0.36 if make is SessionAffinity else 4 * (7 / 20_000) ** 0.5
    assert all(abs(shares[0][i] * 8 / 20_000 - 1) < tolerance for i in range(8))


def test_two_draws_are_of_two_servers_and_the_emptier_is_taken() -> None:
    servers = [Server(0, num_outstanding=1), Server(1)]
    assert {PowerOfTwo(servers, 5)(request(n)).index for n in range(100)} == {1}


@given(st.integers(2, 12), st.data())
def test_a_server_that_leaves_moves_its_own_sessions_only(count: int, data: st.DataObject) -> None:
    servers = [Server(i) for i in range(count)]
    router = SessionAffinity(servers, 1)
    before = [router(request(n, session=n)).index for n in range(300)]
    assert before == [router(request(n + 1000, session=n)).index for n in range(300)]  # whoever asks
    gone = data.draw(st.integers(0, count - 1))
    router.leave(servers[gone])
    after = [router(request(n, session=n)).index for n in range(300)]
    assert all(b == a for b, a in zip(before, after, strict=True) if b != gone)
    router.join(servers[gone])
    assert [router(request(n, session=n)).index for n in range(300)] == before


class Counting(Server):
    """Counts how often its load is looked at."""

    def __getattribute__(self, name: str) -> object:
        if name == "num_outstanding":
            self.num_looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("name", sorted(ROUTERS))
def test_looks_at_servers_do_not_grow_with_their_number(name: str) -> None:
    """A few per request over 1,000 servers, the first choice of each aside."""
    servers = [Counting(i) for i in range(1000)]
    router = ROUTERS[name](servers)
    for number in range(3000):
        router(request(number)).add(1)
    assert sum(server.num_looks for server in servers) < 5 * 3000 + 1000


def test_round_robin_keeps_its_order_and_includes_a_joining_server() -> None:
    servers = [Server(index) for index in range(4)]
    router = ROUTERS["round_robin"](servers[:3])
    assert [router(request(number)).index for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    router.join(servers[3])
    assert sorted(router(request(number)).index for number in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
