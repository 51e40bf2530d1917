"""The edge: JSON without nan, errors as one line, interrupts."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import typer

from perfmodel.cli.terminal import handle_errors, print_json, progress_line, progress_lines, say
from perfmodel.commands.request import Console, Pace
from perfmodel.commands.runs import SimulateRequest, warn_when_long
from perfmodel.errors import SpecError
from perfmodel.renderable import to_jsonable


def test_numbers_without_a_json_word_become_null(capsys):
    print_json({"a": math.nan, "b": [math.inf, 1.5], "c": np.float64("nan"), "d": np.array([1, 2])})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": None, "d": [1, 2]}


def test_other_values_are_as_people_write_them():
    found = to_jsonable({"day": date(2026, 3, 10), "path": Path("a/b"), "set": frozenset({"y", "x"}), 1: True})
    assert found == {"day": "2026-03-10", "path": "a/b", "set": ["x", "y"], "1": True}


def test_input_errors_are_one_line(capsys):
    @handle_errors
    def command():
        raise SpecError("a.yaml:3: engine: got 1; expected 2")

    with pytest.raises(typer.Exit) as stop:
        command()
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err == "error: a.yaml:3: engine: got 1; expected 2\n"


def test_the_time_left_is_proportional_to_the_progress():
    """A quarter in 10 s leaves 30 s; before any progress no remaining time is shown."""
    assert progress_line("simulating", 25, 100, 10.0, Pace((0, 0.0))) == "simulating: 25 of 100, about 30 s left"
    assert progress_line("simulating", 1000, 1000, 10.0, Pace()) == "simulating: 1,000 of 1,000, about 0 s left"
    # Of a burst nothing is answered for 16 s, then a quarter a second.
    pace = Pace()
    assert progress_line("simulating", 1, 100, 16.0, pace) == "simulating: 1 of 100, 16 s so far"
    assert progress_line("simulating", 51, 100, 18.0, pace) == "simulating: 51 of 100, about 1.96 s left"
    # A stage that counts anew has a pace of its own.
    assert progress_line("simulating", 2, 10, 20.0, pace) == "simulating: 2 of 10, 20 s so far"
    assert progress_line("simulating", 6, 10, 22.0, pace) == "simulating: 6 of 10, about 2 s left"
    assert progress_line("screening", 0, None, 20.0, Pace()) == "screening: 20 s so far"


def test_long_work_reports_its_progress_in_a_pipe(capsys):
    """One line per interval, and none after the end."""
    with progress_lines("simulating", every_s=0.02) as update:
        update(1, 3)
        update(2, 3)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 3
    assert all(line.startswith("simulating: 2 of 3, about ") for line in lines[1:])  # the first may come in between
    time.sleep(0.1)
    assert not capsys.readouterr().err


def test_bugs_pass_through():
    @handle_errors
    def command():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupting_keeps_the_finished_records(tmp_path):
    args = ["simulate", "llama-3.1-8b-a100", "--set", "traffic.num_requests=2000000", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "perfmodel", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        # Jobs started in the background ignore SIGINT, and so would this child of theirs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    records = tmp_path / "out" / "requests.csv"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (records.exists() and records.stat().st_size > 10_000):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    assert err.endswith(f"interrupted: the finished requests are in {records}.\n")  # perhaps after how long it takes
    from perfmodel.report.runs import read_requests

    requests = read_requests(records)
    assert len(requests) > 100
    assert (requests.finished_s > requests.arrival_s).all()


@pytest.mark.parametrize("more", [(), ("cluster.autoscaling={target: 8, max_replicas: 2}",)])
def test_intervals_are_a_stage_of_their_own(more):
    """Eight draws, two more of whole runs where replicas come and go; the bar of the run ends before theirs begins."""
    shown = []

    @contextmanager
    def watch(stage):
        shown.append(f"begin {stage}")
        yield lambda done, total: shown.append((stage, done, total))
        shown.append(f"end {stage}")

    overrides = ("traffic.num_requests=300", "traffic.output_tokens={distribution: fixed, value: 20}", *more)
    SimulateRequest("llama-3.1-8b-a100", overrides=overrides).answer(Console(watch))
    assert [line for line in shown if isinstance(line, str)] == [
        *("begin simulating", "end simulating", "begin computing intervals", "end computing intervals"),
    ]
    count = 10 if more else 8
    draws = [line[1:] for line in shown if line[0] == "computing intervals"]
    assert draws == [(done, count) for done in range(count + 1)]


@pytest.mark.parametrize(
    ("total", "wanted"),
    [
        (1_000, ""),
        (25_600, ""),  # 25,000 at that pace are five minutes
        (200_000, "600 of 200,000 requests, 500 in the last 6 s: about 40 minutes left. Fewer show the same: "),
        (10**8, "600 of 100,000,000 requests, 500 in the last 6 s: about 333.3 hours left. Fewer show the same: "),
        (None, ""),
    ],
)
def test_a_run_of_hours_says_so_once_and_how_to_shorten_it(capsys, total, wanted):
    """500 requests in the six seconds since the first answers, 5,000 a minute, however late these came."""
    times = iter([4.0, 5.0, 10.0, 11.0])
    seen = []
    report = warn_when_long(lambda done, total: seen.append(done), say, lambda: next(times))
    for done in (100, 200, 600, 700):
        report(done, total)
    assert seen == [100, 200, 600, 700]
    found = capsys.readouterr().err
    assert found == (f"{wanted}--set traffic.num_requests=5000 takes a minute. Ctrl-C ends it.\n" if wanted else "")
