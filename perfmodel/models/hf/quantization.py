"""`quantization_config` of a checkpoint as a QuantizationSpec: which format, which groups, which components are kept.

Reads fp8, gptq, awq, compressed-tensors, mxfp4, modelopt and bitsandbytes settings. Lists of modules that stay
unquantized are matched against the module names that Hugging Face checkpoints use."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from math import comb, inf
from typing import Any

from perfmodel.files.tables import load_table
from perfmodel.models.architecture import KEYED, DenseFFN, Layer, QuantizationSpec
from perfmodel.models.hf.fields import Fields
from perfmodel.models.number_formats import BITS_PER_WEIGHT

_KEPT = QuantizationSpec().kept
# What stays where `quant_method: mxfp4` quantizes a mixture of experts: Hugging Face's and vLLM's loaders know experts
# alone in it, whatever modules_to_not_convert names (transformers' integrations/mxfp4.py; gpt-oss).
_BESIDE_EXPERTS = frozenset({"attention", "linear_attention", "dense_ffn", "shared_experts"})
# Of a list of ignored modules: steps of a search for all its regular expressions in one name, and characters.
_MAX_SEARCH_STEPS, _MAX_PATTERN_LENGTH, _MAX_NAME_LENGTH, _MAX_PATTERNS_LENGTH = 2e6, 500, 50, 100_000
_REPEATED_GROUP_OR_FLAG = re.compile(r"\)[*+?{]|\(\?(?!:|=|!|<[=!]|P<|i\))")  # comments and (?x) hide a repetition
_IGNORE_KEYS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")

# (weights, activations, group_size, group_rows)
_Formats = tuple[str, str | None, int, int]

_TABLE = load_table("number_formats")
_MODULES: Mapping[str, Sequence[str]] = _TABLE["modules"]
_MODELOPT: Sequence[tuple[str, str, str | None, int, int]] = _TABLE["modelopt"]


def quantization_from_config(fields: Fields, layers: Sequence[Layer]) -> QuantizationSpec:
    """The checkpoint's number formats; the default spec where nothing is quantized. `layers`: the model's, in order."""
    names = ("quantization_config", "compression_config", "quantization")
    settings = next((value for value in map(fields.get, names) if isinstance(value, Mapping)), {})
    if isinstance(settings.get("quantization"), Mapping):  # modelopt's own file nests them
        settings = {**settings, **settings["quantization"]}
    if not settings:
        return QuantizationSpec()
    try:
        spec = _from_settings(fields, settings, layers)
    except (TypeError, ValueError, ArithmeticError, KeyError, AttributeError, re.error) as error:
        raise fields.error(f"quantization_config: cannot read it: {error}.") from None
    for format in (spec.weights, spec.activations, spec.kv_cache):
        if format is not None and format not in BITS_PER_WEIGHT:
            raise fields.error(f"quantization_config: {format!r} is not a known number format.")
    if spec.group_size < 0 or spec.group_rows < 1:
        raise fields.error(
            f"quantization_config: got groups of {spec.group_rows} x {spec.group_size}; expected positive sizes."
        )
    return spec


def _from_settings(fields: Fields, settings: Mapping[str, Any], layers: Sequence[Layer]) -> QuantizationSpec:
    method = _method(settings)
    ignored: list[Any] = next((settings[key] for key in _IGNORE_KEYS if isinstance(settings.get(key), list)), [])
    kept = _KEPT | _kept(map(str, ignored), layers)
    if method == "mxfp4" and any("experts" in _components(layer) for layer in layers):
        kept |= _BESIDE_EXPERTS
    bits: tuple[tuple[str, float], ...] = ()
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping) and groups:  # compressed-tensors and modelopt
        first = next(iter(groups.values()))
        weights = first.get("weights") if isinstance(first, Mapping) else None
        if not isinstance(weights, Mapping) or "num_bits" not in weights:
            raise fields.error("quantization_config.config_groups: the first group has no weights.num_bits.")
        rows, size, inputs = 1, int(weights.get("group_size") or 0), first.get("input_activations")
        if weights.get("strategy") == "block":
            rows, size = _block_of(weights.get("block_structure")) or (rows, size)
        activations = _group_format(inputs) if isinstance(inputs, Mapping) else None
        formats = _group_format(weights), activations, max(size, 0), rows
    elif method in _READERS:
        formats = _READERS[method](settings)
        bits = tuple(sorted((settings.get("bits") or {}).items())) if method == "gguf" else ()
        kept -= {component for component, _ in bits}
    else:
        raise fields.error(
            f"quantization_config.quant_method: got {method!r}; "
            f"expected {', '.join([*(r for r in _READERS if r != 'gguf'), 'compressed-tensors'])}."
        )
    return QuantizationSpec(method, *formats, _kv_cache(settings), kept, bits=bits)


def _method(settings: Mapping[str, Any]) -> str:
    method = str(settings.get("quant_method") or "").lower()
    if method:
        return {"nvfp4": "modelopt", "modelopt_fp4": "modelopt", "auto-round": "auto_round"}.get(method, method)
    if settings.get("quant_algo"):
        return "modelopt"
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return "bitsandbytes"
    return "compressed-tensors" if settings.get("config_groups") else "unknown"


def _block_of(value: Any) -> tuple[int, int] | None:
    """[rows, columns] of weights that share a scale."""
    return (int(value[0]), int(value[1])) if isinstance(value, list) and len(value) == 2 else None


def _fp8(settings: Mapping[str, Any]) -> _Formats:
    rows, columns = _block_of(settings.get("weight_block_size")) or (1, 0)
    return "fp8", "fp8", columns, rows


def _integer_groups(settings: Mapping[str, Any]) -> _Formats:
    """Weight-only integers; group_size -1 is one scale per channel."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    return f"int{bits}", None, max(int(group_size), 0), 1


def _modelopt(settings: Mapping[str, Any]) -> _Formats:
    """By ModelOpt's name of the algorithm (modelopt/torch/export/model_config.py); FP8 where it has none."""
    algorithm = str(settings.get("quant_algo") or "FP8").upper()
    size = int(settings.get("group_size") or 0)
    for part, weights, activations, group_size, rows in _MODELOPT:
        if part in algorithm:
            return weights, activations, (size or group_size) if rows == 1 and group_size else group_size, rows
    known = ", ".join(dict.fromkeys(part for part, *_ in _MODELOPT))
    raise ValueError(f"quant_algo {algorithm!r}; expected names with {known}")


_READERS: Mapping[str, Callable[[Mapping[str, Any]], _Formats]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    **dict.fromkeys(("gptq", "awq", "auto_round"), _integer_groups),
    "mxfp4": lambda _: ("mxfp4", None, 32, 1),
    "modelopt": _modelopt,
    "bitsandbytes": lambda of: ("nf4", None, 64, 1) if of.get("load_in_4bit") else ("int8", "int8", 0, 1),
    # the commonest block format, from `gguf.py`; its name carries the scales
    "gguf": lambda of: (str(of.get("format", "q4_0")), None, 0, 1),
}


def _group_format(part: Mapping[str, Any]) -> str:
    bits, size = int(part.get("num_bits", 8)), int(part.get("group_size") or 0)
    if part.get("type", "int") != "float":
        return f"int{bits}"
    return {16: "nvfp4", 32: "mxfp4"}.get(size, "fp4") if bits == 4 else "mxfp8" if size == 32 else f"fp{bits}"


def _kv_cache(settings: Mapping[str, Any]) -> str | None:
    scheme = settings.get("kv_cache_scheme") or settings.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return _group_format(scheme)
    name = str(scheme or "auto").lower()
    if name in ("auto", "none"):
        return None
    return "fp8" if name.startswith("fp8") else name  # fp8_e4m3 and fp8_e5m2 cost the same


def _kept(ignored: Iterable[str], layers: Sequence[Layer]) -> frozenset[str]:
    """Components whose modules are ignored in at least half of the layers that have them (five layers are looked at).

    Lists name modules (`model.layers.3.self_attn.q_proj`), globs (`model.layers.3.self_attn*`) or regular
    expressions (`re:.*self_attn.*`), per layer or for all."""
    names_ignored, patterns = _matchers(dict.fromkeys(ignored))
    kept = set()
    for component, modules in _MODULES.items():
        having = [index for index, layer in enumerate(layers) if component in _components(layer)]
        sample = having[:: max(len(having) // 5, 1)]
        hits = 0
        for index in sample:
            names = [f"model.layers.{index}.{module}" for module in modules]
            hits += any(not names_ignored.isdisjoint(_parts(name)) for name in names) or any(
                pattern.search(name) for pattern in patterns for name in names
            )
        if hits and 2 * hits >= len(sample):
            kept.add(component)
    return frozenset(kept)


def _components(layer: Layer) -> set[str]:
    """The quantizable components of a layer."""
    components = set()
    if layer.mixer is not None:
        components.add("attention" if isinstance(layer.mixer, KEYED) else "linear_attention")
    if layer.ffn is not None:
        components |= {"dense_ffn"} if isinstance(layer.ffn, DenseFFN) else {"experts", "shared_experts"}
    return components


def _parts(name: str) -> set[str]:
    """All runs of whole words of a module's name: `mlp`, `mlp.gate`, `layers.3.mlp` ..."""
    words = name.split(".")
    return {".".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}


def _matchers(entries: Iterable[str]) -> tuple[set[str], list[re.Pattern[str]]]:
    """The plain names of a list of ignored modules, and its globs and regular expressions, compiled.

    Raises ValueError for a list that would take long to match."""
    names: set[str] = set()
    globs: list[str] = []
    expressions: list[str] = []
    for entry in entries:
        # Prefixes differ between files (`model.language_model.`, `language_model.model.`): compare from `layers.` on.
        tail = entry[entry.index("layers.") :] if "layers." in entry else entry
        if entry.startswith("re:"):
            expressions.append(entry[3:])
        elif re.search(r"[*?[]", tail):
            globs.append(tail)
        else:
            names.add(tail)
    if (length := sum(map(len, globs + expressions))) > _MAX_PATTERNS_LENGTH:  # a long one takes 10 ms to compile
        raise ValueError(
            f"got patterns of {length:,} characters in its list of ignored modules; expected at most "
            f"{_MAX_PATTERNS_LENGTH:,}: name the modules"
        )
    budget = _MAX_SEARCH_STEPS
    for pattern in expressions:
        budget -= _search_steps(pattern)
        if budget < 0:
            raise ValueError(
                f"got the pattern {pattern[:60]!r} in its list of ignored modules, whose search may take too long; "
                f"expected at most {_MAX_PATTERN_LENGTH} characters, three repetitions, none of a group, and few "
                f"alternatives: name the modules, or write globs"
            )
    # A glob must begin and end where a word of a module's name does.
    bodies = [translate(tail).removesuffix("\\Z").removesuffix("\\z") for tail in globs]
    sources = [*map(_unanchored, expressions), *(rf"(?:^|\.){body}(?:\.|$)" for body in bodies)]
    return names, [re.compile(source) for source in sources]


def _search_steps(pattern: str) -> float:
    """An upper bound on the steps of Python's search for a regular expression in a module's name.

    Python tries every way to share n characters out over r repetitions, C(n + r, r), every choice of alternatives, and
    every start. Infinity for repeated groups, where the number of ways is exponential in n."""
    # without escapes and character classes
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "x", _unanchored(pattern))
    repeats = re.findall(r"[*+]|\{\d*,\d*\}|(?<![(*+?}])\?", plain)
    if len(pattern) > _MAX_PATTERN_LENGTH or _REPEATED_GROUP_OR_FLAG.search(plain):
        return inf
    choices = 1
    while group := re.search(r"\(([^()]*)\)", plain):
        choices *= group[1].count("|") + 1
        plain = plain[: group.start()] + "x" + plain[group.end() :]
    choices *= plain.count("|") + 1
    return float(_MAX_NAME_LENGTH * choices * comb(_MAX_NAME_LENGTH + len(repeats), len(repeats)))


def _unanchored(pattern: str) -> str:
    """The expression without `.*` at its ends: a search finds the rest wherever it is."""
    return re.sub(r"(?<!\\)\.\*$", "", re.sub(r"^\.\*(?![*+?{])", "", pattern))
