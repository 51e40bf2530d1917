"""llama-server with a tiny model: reads cases, sends their requests over HTTP, writes what its log says of each step.

    python llama_server.py CASES.json OUT.json      in an environment with xllamacpp and gguf

xllamacpp is llama-server's own code, compiled, with its HTTP server. Each case has a server of its own. Requests are
sent at the times of the case; before which step the server saw one is read from the log, so decisions can be replayed
although they depend on time. `n_keep`, which has no effect without context shift, carries a request's number into the
log. Tokens are drawn with a seed of each request's own, so that equal prompts have different answers.
"""

__all__ = ["run_case"]

import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xllamacpp
from tiny_gguf import VOCABULARY, write_tiny_gguf

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
    """A llama-server in a process of its own, with `parameters` as its `common_params` names them; its log is `log`."""

    def __init__(self, model: Path, log: Path, parameters: dict[str, Any]) -> None:
        answers, asked = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(answers)
            _serve(model, log, parameters, asked)
        os.close(asked)
        with os.fdopen(answers) as fdopen:
            self.address = fdopen.read()
        if not self.address:
            raise RuntimeError("llama-server did not start")

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON answer of `path`."""
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)


def _serve(model: Path, log: Path, parameters: dict[str, Any], address: int) -> None:
    """Serve until the end of the process; the address is written to a file descriptor once requests are taken."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    for name, value in {"verbosity": 5, "warmup": False, "offline": True, "port": 0, **parameters}.items():
        setattr(params, name, value)
    server = xllamacpp.Server(params)
    os.write(address, server.listening_address.encode())
    os.close(address)
    while True:
        time.sleep(60)


def server_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a case under llama.cpp's names."""
    slots, batch = config["max_num_seqs"], config["max_num_batched_tokens"]
    return {
        "n_parallel": slots,
        "n_ctx": slots * config["max_model_len"],
        "n_batch": batch,
        "n_ubatch": min(batch, 512),
        "n_threads_http": 64,
        "cache_ram_mib": 8192 if config.get("cache_ram") else 0,
        "kv_unified": bool(config.get("kv_unified")),
    }


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
    with Server(model, log, server_parameters(case["config"])) as server:
        began = time.monotonic()

        def send(number: int) -> None:
            recorded = requests[number]
            time.sleep(max(began + recorded["arrival"] / 1e3 - time.monotonic(), 0))
            body = {"prompt": prompt_tokens(number, recorded), "n_predict": recorded["output"], "n_keep": number}
            body |= {"ignore_eos": True, "cache_prompt": case["config"]["enable_prefix_caching"]}
            body |= {
                "seed": number,
                "temperature": 1,
                "top_k": 0,
                "top_p": 1,
                "min_p": 0,
            }  # equal prompts, other answers
            answers[number] = server.post("/completion", body)

        threads = [threading.Thread(target=send, args=(number,)) for number in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        _wait_for_log(log, len(requests))
    return _recorded(case, StepLog(log.read_text(errors="replace")), answers)


def _wait_for_log(log: Path, num_requests: int) -> None:
    """The log is written behind the answers."""
    for _ in range(500):
        if log.read_text(errors="replace").count("stop processing: n_tokens") >= num_requests:
            return
        time.sleep(0.02)
    raise RuntimeError("the log has not the end of all requests")


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
    build = version("xllamacpp").rpartition(".")[2]
    document = {"engine": "llama.cpp", "version": build, "cases": recorded}
    Path(out_file).write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
