"""Attention that evicts keys and values by their accumulated scores (H2O), each KV head its own. A sequence has room
for `evicts_to` tokens in a layer. A token's score is the sum of the probabilities that all queries so far gave it, over
the query heads of its KV head. A decode attends to what is held and to itself, adds to the scores, and once there is no
room takes the place of the token with the lowest score among those that are not of the `num_recent_tokens` newest. A
prompt's chunk attends to what is held and, causally, to itself; then the newest stay, and of the others those with the
highest scores. Keys stay rotated by the positions that they came with. Source: Zhang et al. 2023 (H2O), algorithm 1."""

import math

import torch
from torch import Tensor

from perfmodel.models.architecture import Attention
from perfmodel_executors.models.kept import HeldTokens
from perfmodel_executors.models.states import MixerStep

_NONE = -1  # position of an empty place


def attend_evicting(
    step: MixerStep, mixer: Attention, q_TNH: Tensor, k_TKH: Tensor, v_TKV: Tensor, layer: HeldTokens
) -> Tensor:
    """[T, N, H_v], one-token rows first; queries and keys come unrotated. `layer` takes all T tokens in."""
    batch, result = step.batch, []
    q_TNH, k_TKH = step.rotated(mixer, q_TNH, k_TKH)
    q_TKGH = q_TNH.reshape(len(q_TNH), mixer.num_kv_heads, -1, mixer.head_dim)
    split = batch.num_decodes
    if split:
        own, rows = slice(0, split), step.state_rows.decodes
        result.append(_decodes(q_TKGH[own], k_TKH[own], v_TKV[own], batch.contexts_D - 1, rows, layer, mixer))
    before: list[int] = batch.chunks.computed_G.tolist()
    for own, computed, row in zip(step.chunk_rows, before, step.state_rows.chunks.tolist(), strict=True):
        result.append(_chunk(q_TKGH[own], k_TKH[own], v_TKV[own], computed, row, layer, mixer))
    return torch.cat(result).flatten(1, 2)


def _decodes(
    q_DKGH: Tensor, k_DKH: Tensor, v_DKV: Tensor, positions_D: Tensor, rows: Tensor, layer: HeldTokens, mixer: Attention
) -> Tensor:
    k_DKRH, v_DKRV, scores_DKR, places_DKR = (tensor[rows] for tensor in layer)
    scores = torch.cat((q_DKGH @ k_DKRH.mT, (q_DKGH * k_DKH[:, :, None]).sum(dim=-1, keepdim=True)), dim=-1).float()
    is_empty = (places_DKR == 0)[:, :, None]
    scores[..., :-1].masked_fill_(is_empty, -math.inf)
    shares_DKGR = torch.softmax(scores / math.sqrt(mixer.head_dim), dim=-1)
    weights = shares_DKGR.to(q_DKGH.dtype)
    out_DKGV = weights[..., :-1] @ v_DKRV + weights[..., -1:] * v_DKV[:, :, None]
    sums_DKR = shares_DKGR.sum(dim=2)
    scores_DKR = scores_DKR + sums_DKR[..., :-1]
    layer.scores[rows] = scores_DKR
    newest = positions_D[:, None, None] + 1
    can_go = places_DKR <= newest - mixer.num_recent_tokens  # empty ones first, which have no score
    order = scores_DKR.masked_fill(~can_go, math.inf).masked_fill(is_empty[:, :, 0], _NONE)
    slots_DK = order.argmin(dim=-1)
    heads_K = torch.arange(slots_DK.shape[1], device=slots_DK.device)
    at = (rows[:, None], heads_K, slots_DK)
    layer.k[at], layer.v[at] = k_DKH, v_DKV
    layer.scores[at], layer.places[at] = sums_DKR[..., -1], newest[..., 0].expand(slots_DK.shape)
    return out_DKGV


def _chunk(
    q_TKGH: Tensor, k_TKH: Tensor, v_TKV: Tensor, computed: int, row: int, layer: HeldTokens, mixer: Attention
) -> Tensor:
    count, room = min(computed, layer.k.shape[2]), layer.k.shape[2]
    num_new = len(q_TKGH)
    k_KLH = torch.cat((layer.k[row, :, :count], k_TKH.transpose(0, 1)), dim=1)
    v_KLV = torch.cat((layer.v[row, :, :count], v_TKV.transpose(0, 1)), dim=1)
    q_KGTH = q_TKGH.permute(1, 2, 0, 3)
    scores = (q_KGTH @ k_KLH[:, None].mT).float() / math.sqrt(mixer.head_dim)
    hidden_TT = torch.ones(num_new, num_new, dtype=torch.bool, device=scores.device).triu(1)
    scores[..., count:].masked_fill_(hidden_TT, -math.inf)
    shares_KGTL = torch.softmax(scores, dim=-1)
    out_KGTV = shares_KGTL.to(q_TKGH.dtype) @ v_KLV[:, None]
    sums_KL = shares_KGTL.sum(dim=(1, 2))
    sums_KL[:, :count] += layer.scores[row, :, :count]
    new = torch.arange(computed + 1, computed + num_new + 1, device=sums_KL.device).expand(len(sums_KL), -1)
    places_KL = torch.cat((layer.places[row, :, :count], new), dim=1)
    is_recent = places_KL > computed + num_new - mixer.num_recent_tokens
    highest = sums_KL.masked_fill(is_recent, math.inf).topk(min(room, sums_KL.shape[1]), dim=-1)
    kept = highest.indices.sort(dim=-1).values
    for tensor, values in zip(layer, (k_KLH, v_KLV, sums_KL, places_KL), strict=True):
        index = kept if values.dim() == 2 else kept[..., None].expand(-1, -1, values.shape[-1])
        tensor[row, :, : kept.shape[1]] = values.gather(1, index)
    return out_KGTV.permute(2, 0, 1, 3)
