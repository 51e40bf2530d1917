"""What is measured, and the names by which samples and predictions know it."""

__all__ = ["CLIENTS", "PROMPTS", "REPEATS", "SERVED_TYPES", "SLOTS", "SLOT_TOKENS", "TYPES", "Served"]

from typing import NamedTuple

TYPES = ("F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
PROMPTS = ((8, 49), (128, 33), (512, 33))  # of a lone client: tokens of the prompt, of the answer
CLIENTS = (1, 2, 4, 8)
SERVED_TYPES = ("F16", "Q8_0", "Q4_1")  # that several clients ask at once
REPEATS = 4  # servers started of each type
SLOTS, SLOT_TOKENS = 8, 768


class Served(NamedTuple):
    """Clients that send their next request when the last one is answered."""

    prompt: int = 128
    output: int = 48
    rounds: int = 2
