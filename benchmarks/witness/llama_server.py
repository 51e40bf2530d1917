"""llama-server with a tiny model: reads cases, sends their requests over HTTP, writes what its log says of each step.

    python llama_server.py CASES.json OUT.json      in the environment that environments.py makes

Each case has a server of its own. Requests are sent at the times of the case; before which step the server saw one is
read from the log, so decisions can be replayed although they depend on time. `n_keep`, which has no effect without
context shift, carries a request's number into the log.
"""

__all__ = ["run_case"]

import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from tiny_gguf import VOCABULARY, write_tiny_gguf

SERVER = Path(sys.prefix) / "cmake" / "bin" / "llama-server"
_GROUPS, _OWN = 16, 64  # numbers of the first tokens of groups and of what is a request's own

_SLOT = re.compile(r"^.*slot +\S+: id +(\d+) \| task (-?\d+) \| (.*)$")
_DEFERRED = re.compile(r"no slot is available, defer task, id_task = (\d+)")
_NEW_PROMPT = re.compile(r"new prompt, n_ctx_slot = \d+, n_keep = (\d+), task.n_tokens = (\d+)")
_CHUNK = re.compile(r"cached n_tokens = (\d+), memory_seq_rm")
_DECODE = re.compile(r"slot decode token, id=-?\d+, n_ctx = \d+, n_tokens = (\d+)")


class StepLog:
    """What the log of a server tells of the tasks that it had.

    num_steps: steps begun; seen_at: task -> how many steps had begun when the server saw it, in the order of seeing
    """

    def __init__(self, text: str) -> None:
        self.num_steps = 0
        self.seen_at: dict[int, int] = {}
        self.numbers: dict[int, tuple[int, int]] = {}  # task -> number of its request, tokens of its prompt
        self.slots: dict[int, int] = {}
        self._chunks: dict[int, list[tuple[int, int]]] = defaultdict(list)  # task -> (step, tokens computed before)
        self._decodes: list[tuple[int, int, int]] = []  # step, task, tokens computed before
        for line in text.splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        if "posting NEXT_RESPONSE" in line:
            self.num_steps += 1
        elif deferred := _DEFERRED.search(line):
            self.seen_at.setdefault(int(deferred[1]), self.num_steps)
        elif of_slot := _SLOT.match(line):
            self._read_of_slot(int(of_slot[1]), int(of_slot[2]), of_slot[3])

    def _read_of_slot(self, slot: int, task: int, text: str) -> None:
        step = self.num_steps - 1
        if text.startswith("processing task"):
            self.seen_at.setdefault(task, self.num_steps)
            self.slots[task] = slot
        elif prompt := _NEW_PROMPT.match(text):
            self.numbers[task] = int(prompt[1]), int(prompt[2])
        elif chunk := _CHUNK.match(text):
            self._chunks[task].append((step, int(chunk[1])))
        elif decode := _DECODE.match(text):
            self._decodes.append((step, task, int(decode[1])))

    def steps(self) -> list[list[Any]]:
        """[step, grants, preempted] of each step, with requests by their place in `seen_at`."""
        place = {task: i for i, task in enumerate(self.seen_at)}
        grants: list[list[list[int]]] = [[] for _ in range(self.num_steps)]
        for step, task, computed in self._decodes:
            grants[step].append([place[task], computed, 1])
        for task, chunks in self._chunks.items():
            ends = [computed for _, computed in chunks[1:]] + [self.numbers[task][1]]
            for (step, computed), end in zip(chunks, ends, strict=True):
                grants[step].append([place[task], computed, end - computed])
        return [[step, sorted(granted), []] for step, granted in enumerate(grants)]


class Server:
    """A running llama-server with the arguments of a case's `config`; its log goes to `log`."""

    def __init__(self, config: dict[str, Any], model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        slots = config["max_num_seqs"]
        command = [SERVER, "-m", model, "--host", "127.0.0.1", "--port", port, "-lv", 5, "--offline", "--no-warmup"]
        command += ["-np", slots, "-c", slots * config["max_model_len"], "-b", config["max_num_batched_tokens"]]
        command += ["-ub", min(config["max_num_batched_tokens"], 512), "-t", 1, "-tb", 1, "--threads-http", 64]
        command += ["--cache-ram", 8192 if config.get("cache_ram") else 0]
        command += ["--kv-unified" if config.get("kv_unified") else "--no-kv-unified"]
        with log.open("w") as out:
            self._process = subprocess.Popen([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT)

    def __enter__(self) -> "Server":
        for _ in range(1200):
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {self._process.returncode}")
            try:
                self.post("/health")
                return self
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("llama-server did not get ready within a minute")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of `path`."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)


def prompt_tokens(number: int, recorded: dict[str, Any]) -> list[int]:
    """Prompts share their first tokens within a group; every other token chain is its own."""
    shared, group = recorded.get("shared", 0), recorded.get("group", 0)
    base, span = _GROUPS + _OWN + 16, VOCABULARY - _GROUPS - _OWN - 16
    common = [2 + group] + [base + (group * 7919 + place * 31) % span for place in range(1, shared)]
    own = [2 + _GROUPS + number]
    own += [base + (number * 104729 + place * 17) % span for place in range(1, recorded["prompt"] - shared)]
    return common[:shared] + own[: recorded["prompt"] - shared]


def run_case(case: dict[str, Any], model: Path, log: Path) -> dict[str, Any]:
    """The case with arrivals and steps as the server had them."""
    answers: dict[int, Any] = {}
    requests = case["requests"]
    with Server(case["config"], model, log) as server:
        began = time.monotonic()

        def send(number: int) -> None:
            recorded = requests[number]
            time.sleep(max(began + recorded["arrival"] / 1e3 - time.monotonic(), 0))
            body = {"prompt": prompt_tokens(number, recorded), "n_predict": recorded["output"], "n_keep": number}
            body |= {"temperature": 0, "ignore_eos": True, "cache_prompt": case["config"]["enable_prefix_caching"]}
            answers[number] = server.post("/completion", body)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _recorded(case, StepLog(log.read_text(errors="replace")), answers)


def _recorded(case: dict[str, Any], log: StepLog, answers: dict[int, Any]) -> dict[str, Any]:
    """The case in the order in which the server saw its requests. Raises RuntimeError where log and answers differ."""
    steps, requests = log.steps(), []
    for place, (task, step) in enumerate(log.seen_at.items()):
        number, num_tokens = log.numbers[task]
        recorded, answer = case["requests"][number], answers[number]
        grants = [grant for _, granted, _ in steps for grant in granted if grant[0] == place]
        timings = answer["timings"]
        shown = (answer["id_slot"], timings["cache_n"], timings["prompt_n"], timings["predicted_n"])
        logged = (log.slots[task], grants[0][1], num_tokens - grants[0][1], recorded["output"])
        if shown != logged or sum(grant[2] for grant in grants) != logged[2] + recorded["output"] - 1:
            raise RuntimeError(f"request {number}: its answer says {shown} and the log {logged}, {grants}")
        requests.append({**recorded, "arrival": step, "slot": log.slots[task]})
    return {"config": case["config"], "requests": requests, "steps": steps}


def main(cases_file: str, out_file: str) -> None:
    """Run all cases of a file."""
    cases = json.loads(Path(cases_file).read_text(encoding="utf-8"))
    recorded = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "tiny.gguf")
        write_tiny_gguf(model)
        for number, case in enumerate(cases):
            print(f"\r{number} of {len(cases)} cases", end="", file=sys.stderr)
            try:
                recorded.append(run_case(case, model, Path(folder, "log")))
            except (OSError, RuntimeError, KeyError, IndexError) as error:
                recorded.append({**case, "error": f"{type(error).__name__}: {error}"[:300]})
    print(file=sys.stderr)
    version = subprocess.run([SERVER, "--version"], capture_output=True, text=True, check=True)
    build = re.search(r"\d{3,}", version.stdout + version.stderr)
    document = {"engine": "llama.cpp", "version": build[0] if build else "", "cases": recorded}
    Path(out_file).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
