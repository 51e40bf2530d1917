"""State-space scans and linear attention: a state of constant size per sequence instead of a KV cache.

Prefill runs in chunks of c tokens as matrix multiplications inside a chunk and a recurrence between chunks; decode
updates the state once per token, bound by reading and writing it. States are kept in fp32, as the configurations that
say so have it (Qwen3.5, Nemotron-3); the window of the causal convolution is in the model's dtype.
"""

__all__ = [
    "STATE_BYTES",
    "StateShape",
    "causal_conv",
    "chunked_delta_rule",
    "chunked_ssd",
    "selective_scan",
    "state_update",
]

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.ops.work import Work

STATE_BYTES = 4.0  # per element of the recurrent state
_DELTA_CHUNK = 64  # tokens per chunk of the gated delta rule (flash-linear-attention)


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent state on one device: `num_heads` matrices of rows x columns, driven by `num_groups` input groups.

    rows:    key size of linear attention, state size N of a state-space model
    columns: value size of linear attention, head size P of a state-space model
    inputs:  elements per token read and written by the scan (q, k, v or x, B, C, and the output)
    """

    num_heads: int
    rows: int
    columns: int
    num_groups: int
    inputs: int
    dtype: str
    element_bytes: float

    @property
    def state_elements(self) -> int:
        return self.num_heads * self.rows * self.columns


def causal_conv(num_tokens: float, channels: int, kernel: int, element_bytes: float) -> Work:
    """Depthwise causal convolution with activation: FLOPs = 2 k n c (+ 5 n c), bytes 2 n c b (+ weights c k b).

    num_tokens n, channels c: rows and columns; kernel k: taps; element_bytes b: of an element, in bytes
    """
    elements = num_tokens * channels
    return Work(
        "causal_conv",
        "elementwise",
        flops=(2.0 * kernel + 5.0) * elements,
        rate="vector",
        weight_bytes=channels * kernel * element_bytes,
        activation_bytes=2 * elements * element_bytes,
    )


def chunked_ssd(prefills: Sequence[tuple[int, int]], state: StateShape, chunk: int) -> Work:
    """Mamba-2's chunked scan (state-space duality), per token, H heads of P, state N, G groups, chunk c:

        FLOPs = 2 c N G (C B^T) + 2 c P H (the masked product with x) + 4 N P H (into and out of the states)
        bytes = inputs b + (1/c) 8 N P H: every chunk's state is written and read in fp32

    Source: Dao and Gu 2024, listing 1.
    """
    tokens = sum(t for t, _ in prefills)
    per_token = 2.0 * chunk * (state.rows * state.num_groups + state.columns * state.num_heads)
    flops = tokens * (per_token + 4.0 * state.state_elements)
    return _prefill_scan("chunked_scan", prefills, state, flops, tokens / chunk, num_kernels=5, rate=state.dtype)


def chunked_delta_rule(prefills: Sequence[tuple[int, int]], state: StateShape) -> Work:
    """The gated delta rule in chunks of c = 64 (WY form), per token and value head, key size k, value size v:

        FLOPs = 2 c (k + k + v) (K K^T, T K, T V) + c^2 (triangular solve for T) + 2 c (k + v) (Q K^T, scores V)
                + 6 k v (state into W, state into the output, keys into the state)

    Source: Yang et al. 2024, "Parallelizing linear transformers with the delta rule", section 3; 2025 (gated), eq. 10.
    """
    tokens = sum(t for t, _ in prefills)
    k, v, c = state.rows, state.columns, _DELTA_CHUNK
    per_head = 2.0 * c * (3 * k + 2 * v) + c * c + 6.0 * k * v
    flops = tokens * state.num_heads * per_head
    return _prefill_scan("chunked_scan", prefills, state, flops, tokens / c, num_kernels=6, rate=state.dtype)


def selective_scan(prefills: Sequence[tuple[int, int]], state: StateShape) -> Work:
    """Mamba-1's fused scan, token after token in SRAM: 9 FLOPs per token and state element at the vector rate.

    Per element: exp(dt A) as 4, two products, a multiply-add into h, a multiply-add into y less shared ones.
    Source: Gu and Dao 2023, section 3.3 and appendix D.
    """
    tokens = sum(t for t, _ in prefills)
    flops = 9.0 * tokens * state.state_elements
    return _prefill_scan("selective_scan", prefills, state, flops, 0.0, num_kernels=1, rate="vector")


def _prefill_scan(
    name: str,
    prefills: Sequence[tuple[int, int]],
    state: StateShape,
    flops: float,
    num_chunks: float,
    num_kernels: int,
    rate: str,
) -> Work:
    """Inputs and outputs of all tokens, the states between chunks, and each sequence's own state."""
    tokens = sum(t for t, _ in prefills)
    own = 2.0 * len(prefills) * state.state_elements * STATE_BYTES
    return Work(
        name,
        "scan",
        flops=flops,
        rate=rate,
        activation_bytes=tokens * state.inputs * state.element_bytes
        + 2.0 * num_chunks * state.state_elements * STATE_BYTES,
        kv_bytes=own,
        num_kernels=num_kernels if prefills else 0,
    )


def state_update(
    num_seqs: int,
    state: StateShape,
    name: str = "state_update",
    flops_per_element: float = 7.0,
    queries: float = 1.0,
) -> Work:
    """q tokens per sequence: the state is read, decayed, updated, multiplied by the query and written back.

        FLOPs = 7 q B H k v for the delta rule (decay 1, k^T S 2, outer product 2, q^T S 2); 5 to 9 for Mamba
        bytes = 4 (1 + q) B H k v (fp32 state: read once, written after each token) + q B inputs b

    A state after each token is what lets a rejected draft be taken back.
    num_seqs B: sequences of `queries` q tokens each; name: of the operator; flops_per_element: of the state, a token
    Source: Yang et al. 2025, eq. 10 in recurrent form; Gu and Dao 2023, algorithm 1.
    """
    return Work(
        name,
        "scan",
        flops=flops_per_element * queries * num_seqs * state.state_elements,
        rate="vector",
        activation_bytes=queries * num_seqs * state.inputs * state.element_bytes,
        kv_bytes=(1.0 + queries) * num_seqs * state.state_elements * STATE_BYTES,
        num_kernels=1 if num_seqs else 0,
    )
