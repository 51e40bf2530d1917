"""A plug-in for vLLM's CPU build, which else cannot verify drafts.

The runner puts its C++ functions under the names of the rejection sampler's Triton kernels, which are called by
dispatchers that were made before and know none; here the dispatchers get them.
"""

__all__ = ["register"]

_KERNELS = ("rejection_greedy_sample", "rejection_random_sample", "expand", "sample_recovered_tokens")


def register() -> None:
    """Called by vLLM in each of its processes (`vllm.general_plugins`)."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample import rejection_sampler

    for name in _KERNELS:
        dispatcher = getattr(rejection_sampler, f"_{name}", None)
        if dispatcher is not None:
            dispatcher.kernel = getattr(cpu_triton_utils, f"{name}_kernel")
