"""Arguments: those of a scenario, and no others."""

_KNOWN = {
    *("model", "skip_tokenizer_init", "load_format", "max_num_seqs", "max_num_batched_tokens", "block_size"),
    *("enable_prefix_caching", "enable_chunked_prefill", "scheduling_policy", "async_scheduling", "max_model_len"),
    *("tensor_parallel_size", "pipeline_parallel_size", "num_gpu_blocks_override", "dtype", "speculative_config"),
}


class EngineArgs:
    def __init__(self, **given):
        for name in given.keys() - _KNOWN:
            raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {name!r}")
        self.__dict__.update(given)
