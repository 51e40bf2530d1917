"""The wall clock: a scenario's deployment that answers real clients, in the time that its hardware would take.

The engines, the cost model and all that stands before them are the simulated clock's; only who turns the clock differs.
"""

__all__ = ["Emulator", "Fate", "Listener", "Observer", "Order", "PacedClock", "ReplicaDownError"]

from perfmodel.serve.emulator import Emulator, Fate, Listener, Observer, Order, ReplicaDownError
from perfmodel.serve.paced_clock import PacedClock
