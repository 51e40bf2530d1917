"""How many processes are worth starting, on this system and on others."""

import os
import sys

import pytest

from perfmodel.cores import num_cores, num_processes


@pytest.mark.parametrize(("items", "wanted"), [(0, 1), (1, 1), (3, 3), (1000, 8)])
def test_no_more_than_items_or_cores(monkeypatch, items, wanted):
    monkeypatch.setattr("perfmodel.cores.num_cores", lambda: 8)
    assert num_processes(items) == wanted


def test_windows_waits_for_sixty_four_at_most(monkeypatch):
    """WaitForMultipleObjects: MAXIMUM_WAIT_OBJECTS is 64, and `concurrent.futures` refuses more than 61 workers."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    assert num_cores() == 128
    assert num_processes(1000) <= 61


def test_where_the_system_does_not_say_there_is_one(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cores() == num_processes(7) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which cores a process may run on")
def test_linux_counts_the_cores_that_this_process_may_run_on(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5})
    assert num_cores() == 2
