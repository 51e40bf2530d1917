"""`HostCores`: the cores of a host, which the processes of one replica share.

R processes with work for C cores each get min(1, C / R) of one, as Linux shares them out, so that it takes

    f(R) = max(1, R / C)

times as long. B processes poll while their rank has a step (`HostProcesses`) and count as a share p of one each; API
servers count while they take requests in, and all A of them while they send the tokens of the last step, w of work
each, beside which the host's work h of the next one begins:

    t_host = min(h, w) f(1 + p (B - 1) + A) + (h - min(h, w)) f(1 + p (B - 1) + API servers taking in)

Work outside of steps (`FrontEnd`) takes f(p B + API servers at work) when it comes. It is fluid: no process waits for a
time slice, none is bound to a core."""

from collections.abc import Callable, Hashable
from math import inf

from perfmodel.cost import Host
from perfmodel.cost.calibrations.host_work import host_images
from perfmodel.specs.engine.description import HostProcesses
from perfmodel.specs.scenario import Scenario


class HostCores:
    """The cores of one replica.

    num_cores: of a slice of a replica, its share; num_polling: processes of a rank with a step, each as `share` of one
    host: host times of the steps; sent: an API server's ticks for a token that it sends
    num_servers: API servers; num_busy: how many of them take requests in at a tick, with those of num_threads, which
    work on images"""

    def __init__(
        self,
        num_cores: float,
        num_polling: int,
        share: float,
        host: Host,
        sent: int,
        num_servers: int,
        num_busy: Callable[[int], int],
        num_threads: int = 0,
    ) -> None:
        self._num_cores, self._per_rank, self._share, self._host, self._sent = num_cores, num_polling, share, host, sent
        self._num_servers, self._num_busy, self._most_busy = num_servers, num_busy, num_servers + num_threads
        self._ranks: dict[Hashable, int] = {}  # that have a step, by their clock
        self._polling, self._num_taking = 0.0, 0

    def begin(self, clock: Hashable, num_ranks: int, now: int) -> None:
        """So many ranks of `clock` have a step from `now` on."""
        self._host.cores = self
        self._ranks[clock] = num_ranks
        self._polling = self._share * self._per_rank * sum(self._ranks.values())
        self._num_taking = self._num_busy(now)

    def taken_in(self, ticks: int, now: int) -> int:
        """What `ticks` of an API server's work for a request that comes `now` take."""
        return self._stretched(ticks, min(self._num_busy(now) + 1, self._most_busy))

    def sent(self, ticks: int) -> int:
        """What `ticks` of work for tokens of a step take."""
        return self._stretched(ticks, self._num_servers)

    def step(self, serial: int, hidden: int, num_samples: int) -> tuple[int, int]:
        """What `serial` and then `hidden` ticks of the host take in a step that samples for so many sequences."""
        beside = self._sent * -(-num_samples // self._num_servers)
        first = self._step(serial, beside)
        return first, self._step(serial + hidden, beside) - first

    def _step(self, ticks: int, beside: int) -> int:
        beside, works = min(ticks, beside), 1 - self._share  # the process itself has work
        sending = self._stretched(beside, self._num_servers + works)
        return sending + self._stretched(ticks - beside, self._num_taking + works)

    def _stretched(self, ticks: int, others: float) -> int:
        return round(ticks * max(1.0, (self._polling + others) / self._num_cores))


def wanted_cores(scenario: Scenario) -> tuple[tuple[int, float, int], float, float]:
    """A replica's processes that poll, as what share of one with work, and API servers; its cores; and how many it
    wants while one of those that poll has work."""
    engine, host = scenario.engine, scenario.hardware.host
    processes, num_ranks = engine.described.facts.host_processes or HostProcesses(), engine.data_parallel_size
    polling, share = processes.polling(engine.num_devices // num_ranks) * num_ranks, processes.polling_share
    servers, num_cores = engine.api_server_count or num_ranks, inf if host is None else host.cores
    threads = 0 if host_images(scenario) is None else servers * (1 + engine.media_loading_threads)
    return (polling, share, servers), num_cores, 1 + share * (polling - 1) + servers + threads


def core_notes(scenario: Scenario) -> list[str]:
    """That the host takes longer for lack of cores."""
    (polling, _, servers), num_cores, wanted = wanted_cores(scenario)
    if wanted <= num_cores:
        return []
    images = " with their threads for images" if host_images(scenario) is not None else ""
    return [
        f"A replica has {polling} processes that poll and {servers} for API servers{images} on host.cores={num_cores}; "
        f"the host's work takes up to {wanted / num_cores:.2g} times as long."
    ]
