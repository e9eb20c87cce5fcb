"""Softmax attention of candidates' rows, in two parts that are merged by their log-sum-exp. Pure PyTorch.

The history is one part: its keys are the same for all rows of a request, so a fused kernel does it. A row's own
candidate, a few keys, is the other. With weights ``exp(lse_i - lse)`` the sum of both parts is the attention over all.
"""

import torch

from userkv.models.attention.isolation import CandidateRows


def merge_own(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: CandidateRows,
    scale: float,
    history: torch.Tensor | None,
    history_lse: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over the history and the rows' own candidates.

    Args:
        query: ``[rows, heads, d]``, of the candidates' rows.
        keys: ``[rows, width, kv_heads, d]``, of the rows' own candidates.
        values: same shape.
        rows: which of these a row sees.
        scale: of the scores.
        history: ``[rows, heads, d]``, attention over the history alone; ``None`` if there is none.
        history_lse: float32 ``[rows, heads]``, log-sum-exp of its scores.

    Returns:
        ``[rows, heads, d]`` in float32.

    """
    num_rows, num_heads, size = query.shape
    groups = query.view(num_rows, keys.shape[2], -1, size).float()  # Heads that share a key.
    scores = torch.einsum("rkgd,rwkd->rkgw", groups, keys.float()) * scale
    unseen = (rows.own_distance < 0)[:, None, None]
    scores = scores.masked_fill(unseen, -torch.inf)
    own_lse = scores.logsumexp(-1)
    own = torch.einsum("rkgw,rwkd->rkgd", (scores - own_lse.unsqueeze(-1)).exp(), values.float())
    own, own_lse = own.reshape(num_rows, num_heads, size), own_lse.reshape(num_rows, num_heads)
    if history is None or history_lse is None:
        return own
    share = torch.sigmoid(history_lse - own_lse).unsqueeze(-1)  # exp(a) / (exp(a) + exp(b)), without overflow.
    return torch.lerp(own, history.float(), share)
