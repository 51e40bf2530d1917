"""KV that moves while layers are computed, and over a fabric that all transfers share."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.sim import simulate
from perfmodel.sim.clock import TICKS_PER_S, TickEnvironment, to_ticks
from perfmodel.sim.fleet.kv_transfer import Fabric, KvTransfers, TransferCost
from perfmodel.specs import load_scenario

# A token a second over the link, ten layers.
COST = TransferCost(0.5, 1.0, 1.0, 0.0, 1.0, 1, num_layers=10)


def ends(transfers: KvTransfers, env: TickEnvironment, *starts: tuple[float, int, int, int, float]) -> list[float]:
    """Seconds at which transfers end: (start, source, target, tokens, seconds of the prefill before it) each."""
    found = [0.0] * len(starts)

    def done(number: int) -> None:
        found[number] = env.ticks / TICKS_PER_S

    def start(number: int, source: int, target: int, tokens: int, prefill_s: float) -> None:
        computed = (env.ticks - to_ticks(prefill_s), env.ticks) if prefill_s else None
        transfers.start(COST, source, target, tokens, lambda: done(number), computed)

    for number, (at, *rest) in enumerate(starts):
        event = env.timeout(to_ticks(at))
        event.callbacks.append(lambda _, number=number, rest=rest: start(number, *rest))  # type: ignore[misc]
    env.run()
    return found


@pytest.mark.parametrize(
    ("prefill_s", "exposed"),
    [
        (0.0, 20.0),  # it ended before: all of it
        (10.0, 11.0),  # layers had nine seconds: eleven of twenty are left
        (100.0, 2.0),  # all but the last layer
    ],
)
def test_what_is_left_after_the_last_layer_is_exposed(prefill_s: float, exposed: float) -> None:
    env = TickEnvironment()
    assert ends(KvTransfers(env, True), env, (200.0, 0, 1, 20, prefill_s)) == pytest.approx([200 + 0.5 + exposed])


def test_layers_move_only_while_the_links_are_free() -> None:
    """The first transfer has the link until 220.5; the second prefill's layers have 9.5 s of its 30."""
    env = TickEnvironment()
    found = ends(KvTransfers(env, True), env, (200.0, 0, 1, 20, 0.0), (230.0, 0, 2, 20, 30.0))
    assert found == pytest.approx([220.5, 230 + 0.5 + 10.5])


def test_a_busy_link_at_either_end_shortens_the_overlap_with_prefill() -> None:
    """The target's link is busy from 200 to 220.5 s. A prefill of 30 s that ends at 230 s overlaps 9.5 s of its
    transfer; one that ends at 215 s overlaps nothing, and all 20 bytes move after 220.5 s."""
    env = TickEnvironment()
    end_times = ends(KvTransfers(env, True), env, (200.0, 0, 1, 20, 0.0), (230.0, 2, 1, 20, 30.0))
    assert end_times == pytest.approx([220.5, 230 + 0.5 + 10.5])
    env = TickEnvironment()
    end_times = ends(KvTransfers(env, True), env, (200.0, 0, 1, 20, 0.0), (215.0, 2, 1, 20, 30.0))
    assert end_times == pytest.approx([220.5, 220.5 + 0.5 + 20])


def test_two_transfers_share_a_fabric_of_one_link_and_none_is_faster_than_its_own() -> None:
    """10 and 20 tokens: both at half rate until the first is through after 20 s, then the other alone for 10 s."""
    env = TickEnvironment()
    found = ends(KvTransfers(env, fabric=Fabric(env, 1.0)), env, (0.0, 0, 2, 10, 0.0), (0.0, 1, 3, 20, 0.0))
    assert found == pytest.approx([20.5, 30.5])
    env = TickEnvironment()
    found = ends(KvTransfers(env, fabric=Fabric(env, 5.0)), env, (0.0, 0, 2, 10, 0.0), (0.0, 1, 3, 20, 0.0))
    assert found == pytest.approx([10.5, 20.5])


def test_a_fabric_shares_its_bandwidth_max_min_fairly() -> None:
    """Caps of 1, 5 and 5 B/s share 7 B/s: 1, 3 and 3. Transfers of 10 and 30 bytes end after 10 s. The
    other has 30 of its 60 bytes left and continues at its cap of 5 B/s."""
    env, end_times = TickEnvironment(), {}
    fabric = Fabric(env, 7.0)
    for size, cap in ((10.0, 1.0), (60.0, 5.0), (30.0, 5.0)):
        fabric.move(size, cap).callbacks.append(lambda _, size=size: end_times.update({size: env.ticks / TICKS_PER_S}))
    env.run()
    assert end_times == pytest.approx({10.0: 10.0, 30.0: 10.0, 60.0: 16.0})


def test_transfers_of_one_engine_are_serialized_and_the_wait_counts() -> None:
    """Each takes 10 s plus 0.5 s of latency. A shared source or target serializes them; otherwise they overlap."""
    for second, end in (((0, 3), 21.0), ((1, 2), 21.0), ((1, 3), 10.5), ((2, 0), 10.5)):
        env = TickEnvironment()
        transfers = KvTransfers(env)
        end_times = ends(transfers, env, (3.0, 0, 2, 10, 0.0), (3.0, *second, 10, 0.0))
        assert end_times == pytest.approx([3 + 10.5, 3 + end])
        assert transfers.ticks / TICKS_PER_S == pytest.approx(10.5 + end)
        assert (transfers.num_transfers, transfers.num_bytes) == (2, 20.0)


@pytest.mark.parametrize("fabric_bytes_per_s", [None, 100.0])
def test_bytes_are_counted_over_all_links_and_an_abandoned_transfer_counts_none(
    fabric_bytes_per_s: float | None,
) -> None:
    """Four links, of which the busiest carries 10 bytes: 40 in all. The second transfer is abandoned at 15 s, and the
    third, which waits for the same link, starts then."""
    env, ended = TickEnvironment(), []
    transfers = KvTransfers(env, fabric=Fabric(env, fabric_bytes_per_s) if fabric_bytes_per_s else None)
    cost = replace(COST, bytes_factor=4.0)
    started = [
        transfers.start(cost, 0, 1 + n, 10, lambda n=n: ended.append((n, env.ticks / TICKS_PER_S)))  # type: ignore[misc]
        for n in range(3)
    ]
    env.timeout(to_ticks(15.0)).callbacks.append(lambda _: transfers.abandon(started[1]))
    env.run()
    assert ended == [(0, pytest.approx(10.5)), (2, pytest.approx(25.5))]
    assert (transfers.num_transfers, transfers.num_abandoned, transfers.num_bytes) == (2, 1, 80.0)


def test_a_shared_fabric_is_a_processor_shared_by_its_transfers() -> None:
    """M/G/1-PS: a transfer takes S / (1 - rho) on average, whatever the sizes (Kleinrock 1967)."""
    rho, count, rng = 0.6, 20_000, np.random.default_rng(1)
    env, spent = TickEnvironment(), []
    fabric = Fabric(env, 1.0)
    starts, sizes = np.cumsum(rng.exponential(1 / rho, count)), rng.lognormal(-0.5, 1.0, count)  # mean 1

    def go(at: float, size: float) -> None:
        fabric.move(size, 1.0).callbacks.append(lambda _: spent.append(env.ticks / TICKS_PER_S - at))

    for at, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        env.timeout(to_ticks(at)).callbacks.append(lambda _, at=at, size=size: go(at, size))  # type: ignore[misc]
    env.run()
    assert np.mean(spent) == pytest.approx(sizes.mean() / (1 - sizes.mean() * rho), rel=0.03)


def test_layers_make_the_first_token_earlier_and_a_narrow_fabric_later() -> None:
    """Over links on which a transfer takes longer than the decode step that it would hide behind."""
    name, slow = "llama-3.1-70b-h100-disaggregated", "cluster.kv_transfer.bandwidth_bytes_per_s=5 GB/s"
    plain, layers, narrow = (
        simulate(load_scenario(name, ("traffic.num_requests=200", slow, *settings))).summary
        for settings in ((), ("cluster.kv_transfer.layerwise=true",), ("cluster.kv_transfer.shared=true",))
    )
    assert layers["mean_ttft_ms"] < plain["mean_ttft_ms"] <= narrow["mean_ttft_ms"]
    assert layers["kv_transfer"]["bytes"] == plain["kv_transfer"]["bytes"] == narrow["kv_transfer"]["bytes"]
    # No more is saved than the transfers took.
    assert plain["mean_ttft_ms"] - layers["mean_ttft_ms"] < plain["kv_transfer"]["mean_ms"] + 2


@pytest.mark.parametrize(("waited_s", "exposed"), [(1.0, 1.0), (2.0, 0.0), (30.0, 0.0)])
def test_layers_go_on_while_the_target_has_no_step_for_the_request(waited_s: float, exposed: float) -> None:
    """The last layer, 2 of 20 bytes, is ready at 100 s; the target asks for the KV `waited_s` later."""
    env, end_times = TickEnvironment(), list[float]()
    transfers, prefill = KvTransfers(env, True), (0, to_ticks(100.0))
    env.timeout(to_ticks(100.0 + waited_s)).callbacks.append(
        lambda _: transfers.start(COST, 0, 1, 20, lambda: end_times.append(env.ticks / TICKS_PER_S), prefill)
    )
    env.run()
    assert end_times == pytest.approx([100.0 + waited_s + 0.5 + exposed])


def test_layers_wait_for_a_link_that_is_busy_beyond_their_prefill() -> None:
    """The link is busy until 220.5 s, a prefill of 110 s ends at 210 s, and the target asks at 230.5 s: ten of its
    twenty bytes have moved."""
    env, end_times = TickEnvironment(), list[float]()
    transfers, prefill = KvTransfers(env, True), (to_ticks(100.0), to_ticks(210.0))
    for at, target, computed in ((200.0, 1, None), (230.5, 2, prefill)):
        env.timeout(to_ticks(at)).callbacks.append(
            lambda _, target=target, computed=computed: transfers.start(  # type: ignore[misc]
                COST, 0, target, 20, lambda: end_times.append(env.ticks / TICKS_PER_S), computed
            )
        )
    env.run()
    assert end_times == pytest.approx([220.5, 230.5 + 0.5 + 10.0])


def test_one_layer_alone_has_nothing_to_hide_behind() -> None:
    env, cost = TickEnvironment(), replace(COST, num_layers=1)
    found: list[float] = []
    prefill = -to_ticks(100.0), 0
    KvTransfers(env, True).start(cost, 0, 1, 20, lambda: found.append(env.ticks / TICKS_PER_S), prefill)
    env.run()
    assert found == pytest.approx([20.5])
