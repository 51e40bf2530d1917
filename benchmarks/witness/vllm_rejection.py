"""A plug-in for vLLM's CPU build, which else cannot verify drafts.

The runner puts its C++ functions under the names of the rejection sampler's Triton kernels, which are called by
dispatchers that were made before and know none; here the dispatchers get them. `expand_batch_to_tokens` (a value for
each request, to one for each of its drafted tokens) is written anew: the C++ one takes integers alone, and temperatures
are none.
"""

__all__ = ["register"]

from typing import Any

_KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "sample_recovered_tokens")


def register() -> None:
    """Called by vLLM in each of its processes (`vllm.general_plugins`)."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for name in _KERNELS:
        getattr(rejection_sampler, f"_{name}").kernel = getattr(cpu_triton_utils, f"{name}_kernel")
    rejection_sampler.expand_batch_to_tokens = _expand


def _expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Any:
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.where(x != replace_from, x.new_tensor(replace_to)).repeat_interleave(counts.long())
