"""What an emulator's metrics must say, added up again from step records, finished requests and what clients saw."""

import asyncio
from collections import Counter, defaultdict
from itertools import count

from prometheus_client.parser import text_string_to_metric_families

from perfmodel.serve import Emulator, Order
from perfmodel.serve.metrics import Metrics
from perfmodel.sim import Workload


class Page:
    """A rendered page: samples by name and labels."""

    def __init__(self, text):
        self.families = list(text_string_to_metric_families(text.decode()))
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families
            for sample in family.samples
        }

    def __call__(self, name, **labels):
        """The value; where labels are left out, the sum over them."""
        found = [
            value for (its, have), value in self.samples.items() if its == name and labels.items() <= dict(have).items()
        ]
        assert found, f"no {name} with {labels}"
        return sum(found)

    def histogram(self, name, **labels):
        """(number of values, their sum, values up to each bound), over all that have these labels."""
        buckets = Counter()
        for (its, have), value in self.samples.items():
            if its == f"{name}_bucket" and labels.items() <= dict(have).items():
                buckets[float(dict(have)["le"])] += value
        return self(f"{name}_count", **labels), self(f"{name}_sum", **labels), dict(buckets)


class Ledger:
    """Keeps all that an `Observer` is told, and pages of `metrics` as they are after every `page_every`-th step."""

    def __init__(self, metrics, page_every=None):
        self.metrics, self.page_every = metrics, page_every
        self.steps, self.gaps = defaultdict(list), defaultdict(list)
        self.finished, self.lost, self.aborted = [], [], []
        self.outputs = defaultdict(int)  # tokens of each engine's steps
        self.seen = []  # per step: None, or [engine, record, its page, requests that finished with it]
        self._turn = count()

    def on_arrived(self, request):
        pass

    def on_step(self, engine, record, plan, gaps):
        self.steps[engine.index].append(record)
        self.gaps[engine.index] += [(record.end - record.start) / 1e12] * record.num_gaps
        self.gaps[engine.index] += [ticks / 1e12 for ticks, times in gaps for _ in range(times)]
        if self.page_every is not None and next(self._turn) % self.page_every == 0:
            self.seen.append([engine.index, record, Page(self.metrics.render()), 0])
        else:
            self.seen.append(None)

    def on_finished(self, engine, request):
        self.finished.append((engine.index, request))
        if self.seen[-1] is not None and self.seen[-1][0] == engine.index:
            self.seen[-1][3] += 1

    def on_lost(self, request, fate):
        self.lost.append(request)

    def on_aborted(self, request):
        self.aborted.append(request)


class Client:
    """The seconds at which its tokens came."""

    def __init__(self, at):
        self.arrived, self.tokens, self.fate = at, [], None

    def on_tokens(self, num_tokens):
        self.tokens += [asyncio.get_running_loop().time()] * num_tokens

    def on_end(self, fate):
        self.fate = fate


async def served(scenario, names="vllm", legacy=False, leaves=(), page_every=None, model="a/model"):
    """(emulator, metrics, ledger, clients) of the scenario's traffic; clients `leaves` leave 0.3 s after they came."""
    emulator, loop, clients = Emulator(scenario), asyncio.get_running_loop(), []
    metrics = Metrics(emulator, model, names, legacy)
    ledger = Ledger(metrics, page_every)
    emulator.observers.append(ledger)
    emulator.start()
    for request in Workload(scenario).requests():
        await asyncio.sleep(request.arrival / 1e12 - loop.time())
        client = Client(loop.time())
        order = Order(request.num_prompt_tokens, request.max_output_tokens, request.block_hashes, request.priority)
        number = emulator.submit(order, client)
        clients.append(client)
        if number in leaves:
            loop.call_later(0.3, emulator.abort, number)
    while emulator.num_under_way:
        await asyncio.sleep(1)
    emulator.stop()
    return emulator, metrics, ledger, clients
