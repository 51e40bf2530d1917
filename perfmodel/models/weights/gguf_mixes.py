"""llama.cpp's file types: which tensor of a dense decoder is stored in which block format.

A name such as Q4_K_M stands for a mix: most tensors in one format, the values' projection, the FFN's way down and the
LM head in wider ones, some of them in some layers only. Experts, and mixers other than attention, are in the main
format. Source: `llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp, for Llama-like models without an importance
matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.spec import ModelSpec

# (layer, number of layers) -> whether the wider format is taken there
_Where = Callable[[int, int], bool]


def _everywhere(i: int, n: int) -> bool:
    return True


def _more_bits(i: int, n: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third layer between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _first(share: int) -> _Where:
    return lambda i, n: i < n // share


@dataclass(frozen=True)
class GgufMix:
    """main: the format of all tensors but those named; `tensors`: name -> (format, where), the first that applies."""

    main: str
    tensors: Mapping[str, tuple[tuple[str, _Where], ...]] = field(default_factory=dict)
    head: str = "q6_k"
    embedding: str | None = None


def _plain(name: str) -> GgufMix:
    return GgufMix(name)


GGUF_MIXES: MappingProxyType[str, GgufMix] = MappingProxyType(
    {
        **{name: _plain(name) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q6_k", "iq4_nl", "iq4_xs", "iq3_s")},
        "q8_0": GgufMix("q8_0", head="q8_0"),
        # Of the smallest formats the base one; tables of words stay wider.
        "iq3_xxs": GgufMix("iq3_xxs", embedding="iq3_s"),
        **{name: GgufMix(name, head="q5_k", embedding="iq3_s") for name in ("iq2_s",)},
        **{name: GgufMix(name, head="q5_k", embedding="q2_k") for name in ("iq2_xxs", "iq2_xs", "iq1_s", "iq1_m")},
        **{name: GgufMix(name, embedding="q4_k") for name in ("tq1_0", "tq2_0")},
        "q2_k": GgufMix(
            "q2_k",
            {
                "v": (("q3_k", _everywhere),),
                "v_shared": (("q4_k", _everywhere),),
                "down": (("q3_k", _everywhere),),
                "out": (("q3_k", _everywhere),),
            },
        ),
        "q3_k_s": _plain("q3_k"),
        "q3_k_m": GgufMix(
            "q3_k",
            {
                "v": (("q5_k", lambda i, n: i < 2), ("q4_k", _everywhere)),
                "down": (("q5_k", _first(16)), ("q4_k", _everywhere)),
                "out": (("q4_k", _everywhere),),
            },
        ),
        "q3_k_l": GgufMix("q3_k", dict.fromkeys(("v", "down", "out"), (("q5_k", _everywhere),))),
        "q4_k_s": GgufMix("q4_k", {"v": (("q5_k", lambda i, n: i < 4),), "down": (("q5_k", _first(8)),)}),
        "q4_k_m": GgufMix("q4_k", {"v": (("q6_k", _more_bits),), "down": (("q6_k", _more_bits),)}),
        "q5_k_s": _plain("q5_k"),
        "q5_k_m": GgufMix("q5_k", {"v": (("q6_k", _more_bits),), "down": (("q6_k", _more_bits),)}),
    }
)


def tensor_formats(model: ModelSpec, name: str) -> list[dict[str, str]]:
    """The formats that each layer's tensors `qk`, `v`, `out`, `up` and `down` have in the mix `name`."""
    mix, layers = GGUF_MIXES[name], list(model.iter_layers())
    return [
        {
            tensor.removesuffix("_shared"): _format_of(mix, tensor, i, len(layers))
            for _, tensor, _ in _tensors(layer, model.hidden_size)
        }
        for i, layer in enumerate(layers)
    ]


def table_formats(model: ModelSpec, name: str) -> dict[str, str]:
    """The formats of `embedding` and `lm_head`; a table of words that is both is stored as the LM head."""
    mix = GGUF_MIXES[name]
    return {"lm_head": mix.head, "embedding": mix.head if model.tie_word_embeddings else mix.embedding or mix.main}


def component_bits(model: ModelSpec, name: str, bits: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """(component, mean bits of a stored weight) of `model` in the mix `name`; `bits`: of a weight in each format.

    Mixers and blocks of other kinds are in the main format.
    """
    mix, layers = GGUF_MIXES[name], list(model.iter_layers())
    totals: dict[str, list[float]] = {}
    for i, layer in enumerate(layers):
        for component, tensor, size in _tensors(layer, model.hidden_size):
            total = totals.setdefault(component, [0.0, 0.0])
            total[0] += size
            total[1] += size * bits[_format_of(mix, tensor, i, len(layers))]
    found = {component: total / size for component, (size, total) in totals.items()}
    found |= {component: bits[form] for component, form in table_formats(model, name).items()}
    return tuple(sorted(found.items()))


def _format_of(mix: GgufMix, tensor: str, layer: int, num_layers: int) -> str:
    rules = mix.tensors.get(tensor, mix.tensors.get(tensor.removesuffix("_shared"), ()))
    return next((wide for wide, where in rules if where(layer, num_layers)), mix.main)


def _tensors(layer: Layer, hidden: int) -> list[tuple[str, str, int]]:
    """(component, tensor, weights) of what a mix distinguishes; `v_shared`: four query heads or more to a KV head."""
    found: list[tuple[str, str, int]] = []
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, Attention):
        keys = (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
        values = "v_shared" if mixer.num_heads >= 4 * mixer.num_kv_heads else "v"
        found = [
            ("attention", "qk", keys * hidden),
            ("attention", values, mixer.num_kv_heads * mixer.v_head_dim * hidden),
            ("attention", "out", mixer.num_heads * mixer.v_head_dim * hidden),
        ]
    if isinstance(ffn, DenseFFN):
        size = ffn.intermediate_size * hidden
        found += [("dense_ffn", "up", (2 if ffn.gated else 1) * size), ("dense_ffn", "down", size)]
    return found
