"""How fast this machine's memory is: arrays far larger than its caches are copied by all cores at once."""

__all__ = ["copy_bandwidth"]

import threading
import time

import numpy as np

from perfmodel.cores import num_cores

_BYTES = 256 * 2**20  # of all arrays together: more than nearly all caches hold


def copy_bandwidth(seconds: float = 2.0, num_threads: int | None = None) -> float:
    """Bytes read and written in a second by copies of large arrays.

    num_threads: one for each core that this process may run on unless given; numpy copies without Python's lock
    """
    count = num_threads or num_cores()
    moved, started = [0] * count, threading.Barrier(count + 1)

    def copies(index: int) -> None:
        source = np.ones(_BYTES // 2 // count // 8)
        target = np.empty_like(source)
        np.copyto(target, source)  # pages are there from now on
        started.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            np.copyto(target, source)
            moved[index] += 2 * source.nbytes

    threads = [threading.Thread(target=copies, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    started.wait()
    begun = time.perf_counter()
    for thread in threads:
        thread.join()
    return sum(moved) / (time.perf_counter() - begun)
