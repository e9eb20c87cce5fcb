"""HSTU in plain PyTorch, without any cache: what is trained, and what the ranker in vLLM must equal.

The layer (Zhai et al. 2024, "Actions Speak Louder than Words", section 3; names as in the released code)::

    u, v, q, k = split(silu(W_uvqk(layer_norm(x))))
    a          = silu(q k^T / sqrt(dqk) + bias(distance)) / max_sequence_length
    x          = x + W_o(dropout(u * layer_norm(a v)))

There is no softmax: every score counts by itself, so a mask is a product with zero.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from userkv.models.hstu.config import HSTUConfig
from userkv.ranking.prompt import HISTORY


class HSTULayer(nn.Module):
    """One layer; see the module's text."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.num_heads, self.dqk, self.dv = config.num_heads, config.dqk, config.dv
        self.max_sequence_length = config.max_sequence_length
        width, eps = config.item_embedding_dim, config.layer_norm_eps
        self.sizes = [self.num_heads * size for size in (self.dv, self.dv, self.dqk, self.dqk)]
        self.input_norm = nn.LayerNorm(width, eps, elementwise_affine=False)
        self.uvqk = nn.Linear(width, sum(self.sizes), bias=False)
        self.attention_norm = nn.LayerNorm(self.num_heads * self.dv, eps, elementwise_affine=False)
        self.output = nn.Linear(self.num_heads * self.dv, width)
        self.dropout = nn.Dropout(config.linear_dropout_rate)
        longest = config.max_sequence_length + config.max_item_tokens
        self.relative_bias = nn.Parameter(torch.zeros(longest)) if config.enable_relative_attention_bias else None

    def forward(self, x: torch.Tensor, distance: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """One layer.

        Args:
            x: ``[batch, tokens, width]``.
            distance: int64 ``[batch, tokens, tokens]``: how far the key's position lies before the query's, 0 or more.
            mask: bool, same shape: which keys a query sees.

        """
        u, v, q, k = (part.transpose(1, 2) for part in self.project(x))
        scores = q @ k.transpose(-1, -2) * self.dqk**-0.5
        if self.relative_bias is not None:
            scores = scores + self.relative_bias[distance].unsqueeze(1)
        weights = F.silu(scores) / self.max_sequence_length * mask.unsqueeze(1)
        return self.finish(x, u.transpose(1, 2), (weights @ v).transpose(1, 2))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gate, value, query and key of tokens ``[..., width]``, each ``[..., heads, dv or dqk]``."""
        parts = F.silu(self.uvqk(self.input_norm(x))).split(self.sizes, dim=-1)
        return tuple(part.unflatten(-1, (self.num_heads, -1)) for part in parts)

    def finish(self, x: torch.Tensor, u: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output from its input ``[..., width]``, gate and attention ``[..., heads, dv]``."""
        gated = u.flatten(-2) * self.attention_norm(attended.flatten(-2))
        return x + self.output(self.dropout(gated))


class HSTUModel(nn.Module):
    """An HSTU ranker without a cache.

    The state dict is what ``model.safetensors`` holds and the ranker in vLLM loads.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        width = config.item_embedding_dim
        self.item_embedding = nn.Embedding(config.num_items, width)
        self.candidate_embedding = nn.Parameter(torch.zeros(width))
        self.position_embedding = nn.Embedding(config.max_sequence_length + config.max_item_tokens, width)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(width, config.layer_norm_eps, elementwise_affine=False)
        self.heads = nn.Linear(width, len(config.tasks))
        self.dropout = nn.Dropout(config.linear_dropout_rate)
        nn.init.normal_(self.item_embedding.weight, std=width**-0.5)
        nn.init.normal_(self.position_embedding.weight, std=width**-0.5)

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer: item, position, and for a candidate's first token that it is one.

        Args:
            token_ids: int64, any shape.
            positions: int64, same shape: logical positions.

        """
        candidate = token_ids >= self.config.num_items
        items = self.item_embedding(token_ids - candidate * self.config.num_items)
        return items + self.position_embedding(positions) + candidate.unsqueeze(-1) * self.candidate_embedding

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Hidden states of a batch.

        Args:
            token_ids: int64 ``[batch, tokens]``.
            positions: int64, same shape: logical positions.
            mask: bool ``[batch, tokens, tokens]``: which keys (last) a query sees.

        Returns:
            ``[batch, tokens, width]``, before the heads.

        """
        x = self.dropout(self.embed(token_ids, positions))
        distance = (positions.unsqueeze(-1) - positions.unsqueeze(-2)).clamp(min=0)
        for layer in self.layers:
            x = layer(x, distance, mask)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The tasks' logits ``[..., tasks]`` of hidden states ``[..., width]``."""
        logits: torch.Tensor = self.heads(self.norm(hidden))
        return logits


def isolation_mask(positions: torch.Tensor) -> torch.Tensor:
    """Which tokens of one prompt see which: the history causally, candidates the history and themselves.

    Args:
        positions: int64 ``[3, tokens]`` from :meth:`RankingFormat.positions`, of a whole prompt.

    Returns:
        bool ``[tokens, tokens]``, queries first.

    """
    own, history_len = positions[1], positions[2]
    at = torch.arange(positions.shape[1], device=positions.device)
    causal = at.unsqueeze(1) >= at
    of_history = at < history_len.unsqueeze(1)
    same_candidate = (own.unsqueeze(1) == own) & (own != HISTORY)
    return causal & (of_history | same_candidate)
