"""What torch.compile makes of the executor's elementwise chains on a CPU: steps of tiny-llama, eager and compiled.

`python benchmarks/compiled_chains.py`: a minute or more for the compiler's first calls, seconds for the rest. Compiled
are the functions between products, norms with their residual sums and activations (`chains`), or those with the two
products of a feed-forward block (`blocks`). Times are those of the thread, the lower quartile of 60 rounds in turns;
the largest difference of the logits says that both compute the same.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from perfmodel.specs import load_model
from perfmodel_executors.kernels import Kernels, load_kernels
from perfmodel_executors.models.batch import TokenSegment, build_batch
from perfmodel_executors.models.decoder import Decoder

ROUNDS, BLOCK, CONTEXT = 60, 16, 200
STEPS = {
    "decode, 1 sequence": [TokenSegment([5], CONTEXT, list(range(13)))],
    "decode, 8 sequences": [TokenSegment([5 + i], CONTEXT, list(range(13 * i, 13 * (i + 1)))) for i in range(8)],
    "prompt of 128": [TokenSegment(list(range(128)), 0, list(range(8)))],
}


def with_compiled_blocks(decoder: Decoder) -> Decoder:
    """Feed-forward blocks as one compiled function each."""
    vars(decoder)["_dense"] = torch.compile(decoder._dense, dynamic=True)
    return decoder


def compiled_chains() -> Kernels:
    kernels = load_kernels()
    kernels.add_rms_norm = torch.compile(kernels.add_rms_norm, dynamic=True)
    kernels.activate = torch.compile(kernels.activate, dynamic=True)
    return kernels


def steps_of(decoder: Decoder) -> dict[str, Callable[[], Tensor]]:
    def step(segments: list[TokenSegment]) -> Callable[[], Tensor]:
        cache = decoder.new_cache(BLOCK, 128)  # of its own: what one step writes another would read
        return lambda: decoder.forward(build_batch(segments, BLOCK), cache)

    return {name: step(segments) for name, segments in STEPS.items()}


def main() -> None:
    torch.set_num_threads(1)
    model, dtype = load_model("tiny-llama"), torch.bfloat16
    decoders = {
        "eager": Decoder(model, dtype, seed=1),
        "chains": Decoder(model, dtype, seed=1, kernels=compiled_chains()),
        "blocks": with_compiled_blocks(Decoder(model, dtype, seed=1)),
    }
    with torch.inference_mode():
        steps = {name: steps_of(decoder) for name, decoder in decoders.items()}
        apart = {n: max(float((steps["eager"][s]() - own[s]()).abs().max()) for s in own) for n, own in steps.items()}
        times: dict[tuple[str, str], list[float]] = {}
        for _ in range(ROUNDS):
            for name, own in steps.items():
                for what, step in own.items():
                    start = time.thread_time()
                    step()
                    times.setdefault((name, what), []).append(time.thread_time() - start)
    for what in STEPS:
        eager, *others = (sorted(times[name, what])[ROUNDS // 4] * 1e3 for name in decoders)
        gains = ", ".join(f"{name} {eager / own:.2f}" for name, own in zip(("chains", "blocks"), others, strict=True))
        print(f"{what}: eager {eager:.2f} ms; speedup of compiled {gains}", flush=True)
    print("largest difference of a logit:", ", ".join(f"{n} {v:.3g}" for n, v in apart.items() if n != "eager"))


if __name__ == "__main__":
    main()
