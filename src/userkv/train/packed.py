"""The HSTU ranker on a training sequence: one history, and candidates for many moments of it.

A candidate for the moment ``t`` sees the first ``t`` items and itself, and its logical position is ``t``: what the
served model does with a history of ``t`` items (``RankingFormat``), for all moments in one pass. It equals
:class:`HSTUModel` under the mask that says so; but the attention of candidates to each other, which that mask throws
away, is never computed, and neither is what the last layer makes of the history.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from userkv.models.hstu.reference import HSTULayer, HSTUModel

MASKED = -1e4
"""Added to a score, it makes ``silu`` and its slope exactly zero; ``silu(-inf)`` would be no number."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Training sequences.

    Attributes:
        history: int64 ``[batch, items]``: tokens of items, padded at the end with any.
        moments: int64 ``[batch, moments]``: how many items each moment sees, at most ``items``.
        candidates: int64 ``[batch, moments, candidates]``: tokens of items, not moved by the candidates' offset.

    """

    history: torch.Tensor
    moments: torch.Tensor
    candidates: torch.Tensor


def packed_logits(model: HSTUModel, packed: Packed) -> torch.Tensor:
    """The tasks' logits of all candidates, ``[batch, moments, candidates, tasks]``."""
    length = packed.history.shape[1]
    positions = torch.arange(length)
    offset = model.config.num_items
    history = model.dropout(model.embed(packed.history, positions.expand_as(packed.history)))
    at = packed.moments.unsqueeze(-1).expand_as(packed.candidates)
    candidates = model.dropout(model.embed(packed.candidates + offset, at))
    # Row t: what the position t sees of the history, itself left out.
    distance = torch.arange(length + 1).unsqueeze(1) - positions
    hidden = (distance <= 0).to(candidates.dtype) * MASKED
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, HSTULayer)
        last = number == len(model.layers) - 1
        history, candidates = _layer(layer, history, candidates, distance.clamp(min=0), hidden, packed.moments, last)
    return model.logits(candidates)


def _layer(
    layer: HSTULayer,
    history: torch.Tensor,
    candidates: torch.Tensor,
    distance: torch.Tensor,
    hidden: torch.Tensor,
    moments: torch.Tensor,
    last: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, length, _ = history.shape
    num_moments, num_candidates = candidates.shape[1:3]
    heads = layer.num_heads
    u, v, q, k = layer.project(history)
    own_u, own_v, own_q, own_k = layer.project(candidates)
    keys = (k * layer.dqk**-0.5).permute(0, 2, 3, 1).flatten(0, 1)  # [batch * heads, dqk, items]
    values = (v / layer.max_sequence_length).transpose(1, 2).flatten(0, 1)  # [batch * heads, items, dv]
    bias = hidden if layer.relative_bias is None else layer.relative_bias[distance] + hidden  # [items + 1, items]

    queries = own_q.flatten(1, 2).transpose(1, 2).flatten(0, 1)  # [batch * heads, moments * candidates, dqk]
    seen = bias[moments].view(batch, 1, num_moments, 1, length)
    seen = seen.expand(batch, heads, num_moments, num_candidates, length).reshape(
        batch * heads, num_moments * num_candidates, length
    )
    found = F.silu(torch.baddbmm(seen, queries, keys)) @ values
    attended = found.unflatten(0, (batch, heads)).transpose(1, 2).unflatten(1, (num_moments, num_candidates))
    attended = attended + _self_weight(layer, own_q, own_k).unsqueeze(-1) * own_v
    candidates = layer.finish(candidates, own_u, attended)
    if last:
        return history, candidates

    queries = q.transpose(1, 2).flatten(0, 1)
    found = F.silu(torch.baddbmm(bias[:length].expand(batch * heads, -1, -1), queries, keys)) @ values
    attended = found.unflatten(0, (batch, heads)).transpose(1, 2)
    attended = attended + _self_weight(layer, q, k).unsqueeze(-1) * v
    return layer.finish(history, u, attended), candidates


def _self_weight(layer: HSTULayer, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The weight that a token gives itself, ``[..., heads]``, from its query and key ``[..., heads, dqk]``."""
    scores = (q * k).sum(-1) * layer.dqk**-0.5
    if layer.relative_bias is not None:
        scores = scores + layer.relative_bias[0]
    return F.silu(scores) / layer.max_sequence_length
