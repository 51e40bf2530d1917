"""`perfmodel memory SCENARIO`: what lies in device memory, and how much it can serve."""

__all__ = ["memory"]

from perfmodel.answers.asked import MEMORY_FLAGS, Asked
from perfmodel.answers.short_forms import PARALLELISM
from perfmodel.cli.flags import takes_flags, takes_short_forms
from perfmodel.cli.options import JsonFlag, Overrides
from perfmodel.cli.terminal import give


@takes_flags(*MEMORY_FLAGS)
@takes_short_forms(*PARALLELISM)
def memory(asked: Asked, overrides: Overrides = None, as_json: JsonFlag = False) -> None:
    """Show weights, KV cache and activations per device, and the largest batch and context that fit.

    Of an engine that keeps layers with the CPU (llama.cpp), also which GGUF types fit: how many layers on the device.
    """
    from perfmodel.answers.memory import answer_memory

    give(answer_memory(asked, overrides), as_json)
