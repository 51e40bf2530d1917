"""Attention profiled over whole batches (`attention.csv` of a card): prompts, decodes, and both in one varlen kernel.

Columns: prefill_chunk (new tokens of the one prompt, 0: none), kv_prefill (its cached tokens), n_decode, kv_decode
(tokens of each decode), time_us. The heads are not in the table: they come with it. Decodes alone are rows of the
decode form, prompts alone of the prefill form; the mixed form takes all batches with a prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.cost.forms.attention.decode import DecodeSizes, FlashDecodeFit
from perfmodel.cost.forms.attention.mixed import MixedAttentionFit, MixedSizes, mixed_seconds
from perfmodel.cost.forms.attention.prefill import FlashPrefillFit, PrefillSizes
from perfmodel.cost.forms.device import DeviceFacts
from perfmodel.cost.forms.fits import Domain, joined, take
from perfmodel.cost.forms.overheads import load_overheads
from perfmodel.errors import SpecError
from perfmodel.evidence.fit import attention_decode, attention_prefill
from perfmodel.evidence.fit.forms import fit_group
from perfmodel.evidence.observation import table_rows
from perfmodel.evidence.sources.kernels import Group
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.models.architecture import Attention
from perfmodel.ops.extents import DecodeExtent, HeadsExtent
from perfmodel.ops.sharding import Sharding
from perfmodel.specs import EngineSpec, load_hardware, load_model

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]

_ELEMENT_BYTES = 2.0
_SOFTMAX_OPS = range(2, 100, 2)  # what is tried, in the digits that two cards give
_FREE = (
    "launch_s",
    "tensor_fraction",
    "memory_fraction",
    "block_tokens",
    "tail",
    "decode_tile",
    "empty_s",
    "reread",
)


@dataclass(frozen=True, slots=True)
class Profile:
    """One table: its columns and the attention heads of one device of the group that it was taken on."""

    columns: Mapping[str, Floats]
    heads: int
    kv_heads: int
    head_dim: int

    def __getitem__(self, name: str) -> Floats:
        return np.asarray(self.columns[name], dtype=np.float64)

    def full(self, value: float) -> Floats:
        """A column of one value."""
        return np.full(len(self["time_us"]), float(value))

    @property
    def extent(self) -> HeadsExtent:
        """The heads, the same in all rows."""
        numbers = (self.heads, self.kv_heads, self.head_dim, self.head_dim, _ELEMENT_BYTES, 0)
        return HeadsExtent(*(self.full(number) for number in numbers))


def read_profiles(folder: str | Path) -> list[Profile]:
    """The tables `<folder>/ops/tp<degree>/attention.csv` (or `.csv.gz`), with the heads of the profiled model."""
    root = Path(folder) / "ops"
    model = load_model(str(load_yaml(root / "meta.yaml").data["model"]))
    mixer = next((layer.mixer for layer in model.iter_layers() if isinstance(layer.mixer, Attention)), None)
    if mixer is None:
        return []
    profiles = []
    for degree in sorted(root.glob("tp*")):
        shard = Sharding.of(EngineSpec(tensor_parallel_size=int(degree.name.removeprefix("tp"))))
        for file in degree.glob("attention.csv*"):
            heads, kv_heads = shard.columns(mixer.num_heads), shard.kv_heads(mixer.num_kv_heads)
            profiles.append(Profile(_columns(file), heads, kv_heads, mixer.head_dim))
    return profiles


def read_cards(folder: str | Path) -> list[tuple[DeviceFacts, Group]]:
    """Each card whose layer profile is in a folder below `folder`, with its batches that have a prompt."""
    cards = []
    for meta in sorted(Path(folder).glob("*/ops/meta.yaml")):
        device = DeviceFacts.of(load_hardware(str(load_yaml(meta).data["gpu"])))
        profiles = read_profiles(meta.parents[1])
        cards += [(device, group) for group in groups(profiles) if group.key.startswith("attention_mixed")]
    return cards


def _columns(file: Path) -> dict[str, Floats]:
    rows = table_rows(file)
    return {name: np.array([float(row[name]) for row in rows]) for name in (rows[0] if rows else ())}


def groups(profiles: list[Profile], engine: str = "vllm") -> list[Group]:
    """Decodes alone, prompts alone, and batches with a prompt, all profiles of a card together."""
    decode = [_decode_sizes(profile) for profile in profiles]
    prompt = [_prompt_sizes(profile) for profile in profiles]
    mixed = [_mixed_sizes(profile) for profile in profiles]
    seconds = np.concatenate([profile["time_us"] for profile in profiles]) * 1e-6
    is_prompt = np.concatenate([profile["prefill_chunk"] > 0 for profile in profiles])
    is_decode = np.concatenate([profile["n_decode"] > 0 for profile in profiles])
    head_dim = profiles[0].head_dim
    result = []
    for family, parts, rows in (
        ("attention_decode", decode, np.flatnonzero(~is_prompt)),
        ("attention_prefill", prompt, np.flatnonzero(is_prompt & ~is_decode)),
        ("attention_mixed", mixed, np.flatnonzero(is_prompt)),
    ):
        sizes, key = take(joined(parts), rows), f"{family}/bf16/kv_bf16/hd{head_dim}/flash2"
        result.append(Group(engine, key, sizes, seconds[rows], rows))
    return result


def fit(group: Group, device: DeviceFacts) -> FlashDecodeFit | FlashPrefillFit | MixedAttentionFit:
    """The parameters of one kernel."""
    if group.key.startswith("attention_decode"):
        return attention_decode.fit(group, device)
    if group.key.startswith("attention_prefill"):
        return attention_prefill.fit(group, device)
    return _fit_mixed(group, device, load_overheads().softmax_ops)


def _fit_mixed(group: Group, device: DeviceFacts, softmax_ops: float) -> MixedAttentionFit:
    domain = Domain(head_dim=int(float(group.sizes.heads.head_dim[0])))
    start = MixedAttentionFit(domain=domain, rate="bf16", softmax_ops=softmax_ops)
    starts: tuple[dict[str, float], ...] = ({}, {"tensor_fraction": 0.9})
    return fit_group(group, _mixed_seconds, start, device, free=_FREE, starts=starts, most_rows=3000)


def _mixed_seconds(sizes: MixedSizes, fit: MixedAttentionFit, device: DeviceFacts) -> Floats:
    return np.asarray(mixed_seconds(sizes, fit, device).duration)


def fit_softmax(cards: Sequence[tuple[DeviceFacts, Group]]) -> float:
    """Vector operations per score that leave least of the batches with a prompt on all cards unexplained.

    On one card the softmax cannot be told from slower products. Cards do it whose tensor and vector rates differ, as no
    product is faster than the peak (`tensor_fraction` is 1 at most).

    cards: each with its group of mixed batches. Raises SpecError for fewer than two.
    """
    if len(cards) < 2:
        raise SpecError(f"found {len(cards)} layer profiles; the softmax is told from products by two cards or more.")

    def left(softmax_ops: float) -> float:
        fits = [(group, device, _fit_mixed(group, device, softmax_ops)) for device, group in cards]
        return sum(float(np.mean(np.abs(np.log(predict(g, fit, d) / g.seconds)))) for g, d, fit in fits)

    return float(min(_SOFTMAX_OPS, key=left))


def predict(group: Group, fit: FlashDecodeFit | FlashPrefillFit | MixedAttentionFit, device: DeviceFacts) -> Floats:
    """Seconds of each row."""
    if isinstance(fit, FlashDecodeFit):
        return attention_decode.predict(group, fit, device)
    if isinstance(fit, FlashPrefillFit):
        return attention_prefill.predict(group, fit, device)
    return _mixed_seconds(group.sizes, fit, device)


def _decode_sizes(profile: Profile) -> DecodeSizes:
    batch, full = profile["n_decode"], profile.full
    new_token = profile.kv_heads * profile.head_dim * 2 * _ELEMENT_BYTES
    length = profile["kv_decode"] + 1
    return DecodeSizes(
        DecodeExtent(profile.extent, num_seqs=batch, kv_tokens=batch * length),
        length,
        kv_token_bytes=full(new_token),
        io_bytes=batch * (2 * _ELEMENT_BYTES * profile.heads * profile.head_dim + 2 * new_token),
        flops_per_token=full(4 * profile.head_dim),
    )


def _prompt_sizes(profile: Profile) -> PrefillSizes:
    full = profile.full
    return PrefillSizes(
        profile.extent,
        tokens=profile["prefill_chunk"],
        cached=profile["kv_prefill"],
        count=full(1),
        io_bytes=full(2 * _ELEMENT_BYTES * profile.head_dim * profile.heads),
        kv_bytes=full(2 * _ELEMENT_BYTES * profile.head_dim * profile.kv_heads),
    )


def _mixed_sizes(profile: Profile) -> MixedSizes:
    full = profile.full
    return MixedSizes(
        profile.extent,
        tokens=profile["prefill_chunk"],
        cached=profile["kv_prefill"],
        decodes=profile["n_decode"],
        length=profile["kv_decode"] + 1,
        kv_token_bytes=full(2 * _ELEMENT_BYTES * profile.head_dim * profile.kv_heads),
        longest=full(1.0),
    )
