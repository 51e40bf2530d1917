"""How many streamed tokens a second the emulator carries on one core, and how late its steps end then.

    python benchmarks/emulator_rate.py [--streams 64,128,256] [--seconds 10] [--scenario llama-3.1-8b-h100-2048-256]

For each number of streams a server in a process of its own answers as many clients, which this process holds on plain
sockets and counts: each sends its next request when it has its answer. Both are pinned to a core each, where there
are two. What is printed is measured, and depends on the machine and on what else it does.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import signal
import socket
import time

import numpy as np

from perfmodel.listening import Listening
from perfmodel.serve import Emulator
from perfmodel.serve.emulator_server import warm_up
from perfmodel.serve.http import build_app, serve
from perfmodel.serve.settings import ServerSettings
from perfmodel.sim.clock import TICKS_PER_S
from perfmodel.specs import load_scenario

WARM_S = 2.0


CORES = sorted(os.sched_getaffinity(0))


def pin(cores, number):
    """Run on one of `cores`, if there are several."""
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def server(cores, scenario, sets, seconds, pipe):
    """Serve for `seconds` after `pipe` was told the port; then tell it what they took."""
    pin(cores, 0)
    emulator, late = Emulator(load_scenario(scenario, sets)), []
    warm_up(emulator.scenario)
    settings = ServerSettings(port=0, drain_s=0)

    async def measured():
        await asyncio.sleep(WARM_S)
        late.clear()
        wall, cpu, slowed = time.perf_counter(), time.process_time(), emulator.clock.slowed_s
        await asyncio.sleep(seconds)
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        pipe.send((share, emulator.clock.slowed_s - slowed, np.percentile(late or [0.0], [50, 99, 100]).tolist()))

    async def main():
        emulator.start()
        emulator.observers.append(StepEnds(emulator, late))
        serving = asyncio.ensure_future(serve([Listening(build_app(emulator, settings), 0)], settings, say_port))
        await measured()
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        emulator.stop()

    def say_port(ports):
        pipe.send(ports[0])

    asyncio.run(main())


class StepEnds:
    """An observer that notes by how many seconds the ends of steps come late, in `late`."""

    def __init__(self, emulator, late):
        self.emulator, self.late, self.origin = emulator, late, asyncio.get_running_loop().time()

    def on_step(self, engine, record, plan, gaps):
        due = self.origin + self.emulator.clock.slowed_s + record.end / TICKS_PER_S
        self.late.append(asyncio.get_running_loop().time() - due)

    def on_arrived(self, *_):
        pass

    on_finished = on_lost = on_aborted = on_arrived


class Streams:
    """`count` clients in a closed loop, each on a connection of its own; their first answers are of different lengths,
    so that they do not go on in step."""

    def __init__(self, port, count, num_tokens, prompt_words):
        self.request = _request(num_tokens, prompt_words)
        self.num_tokens = 0
        self.selector = selectors.DefaultSelector()
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(_request(1 + num_tokens * number // count, prompt_words))
            self.selector.register(sock, selectors.EVENT_READ)

    def run(self, seconds):
        """Tokens that came in as many `seconds`."""
        before, end = self.num_tokens, time.perf_counter() + seconds
        while time.perf_counter() < end:
            for key, _ in self.selector.select(0.1):
                data = key.fileobj.recv(1 << 16)
                self.num_tokens += data.count(b'"text"')
                if data.endswith(b"0\r\n\r\n"):
                    key.fileobj.sendall(self.request)
        return self.num_tokens - before

    def close(self):
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()


def _request(num_tokens, prompt_words):
    body = {"prompt": "word " * prompt_words, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + data


def measure(arguments, count):
    """A row of the table."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=server, args=(CORES, arguments.scenario, arguments.set, arguments.seconds, there)
    )
    process.start()
    streams = Streams(here.recv(), count, arguments.tokens, arguments.words)
    streams.run(WARM_S)
    num_tokens = streams.run(arguments.seconds - 0.1)
    share, slowed, (median, p99, worst) = here.recv()
    streams.close()
    process.join()
    rate = num_tokens / (arguments.seconds - 0.1)
    micros = share / max(rate, 1) * 1e6
    return (
        f"{count:8d} {rate:10,.0f} {share:8.0%} {micros:10.1f} {median * 1e3:8.2f} {p99 * 1e3:8.2f} "
        f"{worst * 1e3:8.2f} {slowed * 1e3:10.1f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", default="llama-3.1-8b-h100-2048-256")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--streams", default="32,64,128,192,256")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    arguments = parser.parse_args()
    pin(CORES, 1)
    print(" streams   tokens/s     core  us/token  late p50      p99      max  slowed ms")
    for count in arguments.streams.split(","):
        print(measure(arguments, int(count)), flush=True)


if __name__ == "__main__":
    main()
