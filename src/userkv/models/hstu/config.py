"""The configuration of an HSTU ranker, in the names of the published HSTU and FuXi-alpha configurations."""

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

MODEL_TYPE = "hstu_ranker"
ARCHITECTURE = "HSTURanker"
MAX_CANDIDATE_TOKENS = 8192
"""Tokens of all candidates of a request, unless ``model_max_length`` or vLLM's ``--max-model-len`` says otherwise."""


class HSTUConfig(PretrainedConfig):
    """Shape of an HSTU ranker.

    Names and meaning follow the released code of "Actions Speak Louder than Words" (HSTU, Meta) and FuXi-alpha.
    ``vocab_size`` counts the items' tokens twice: a candidate's first token has an id of its own
    (``userkv_ranking.candidate_offset``, see ``ranking/prompt.py``).

    Args:
        num_items: tokens that items use, special tokens included.
        item_embedding_dim: width of the model.
        num_blocks: layers.
        num_heads: attention heads.
        dqk: size of a head's query and key. The ranker needs ``dqk == dv``, since both share a KV block.
        dv: size of a head's value.
        max_sequence_length: the longest history in tokens; candidates come on top of it.
        max_item_tokens: tokens of the longest item.
        linear_dropout_rate: in training.
        enable_relative_attention_bias: add a learned number to each score, by distance.
        tasks: names of the heads.
        task_weights: a candidate's score is the sum of its tasks' probabilities with these weights.
        layer_norm_eps: of all layer norms.

    """

    model_type = MODEL_TYPE

    def __init__(
        self,
        num_items: int = 1024,
        item_embedding_dim: int = 64,
        num_blocks: int = 2,
        num_heads: int = 2,
        dqk: int = 32,
        dv: int = 32,
        max_sequence_length: int = 256,
        max_item_tokens: int = 1,
        linear_dropout_rate: float = 0.2,
        enable_relative_attention_bias: bool = True,
        tasks: Sequence[str] = ("click",),
        task_weights: Sequence[float] | None = None,
        layer_norm_eps: float = 1e-6,
        **kwargs: Any,
    ) -> None:
        self.num_items = num_items
        self.item_embedding_dim = item_embedding_dim
        self.num_blocks = num_blocks
        self.num_heads = num_heads
        self.dqk = dqk
        self.dv = dv
        self.max_sequence_length = max_sequence_length
        self.max_item_tokens = max_item_tokens
        self.linear_dropout_rate = linear_dropout_rate
        self.enable_relative_attention_bias = enable_relative_attention_bias
        self.tasks = list(tasks)
        self.task_weights = list(task_weights) if task_weights is not None else [1.0] * len(self.tasks)
        self.layer_norm_eps = layer_norm_eps
        # What vLLM asks of every model.
        self.vocab_size = 2 * num_items
        self.hidden_size = item_embedding_dim
        self.num_hidden_layers = num_blocks
        self.num_attention_heads = num_heads
        self.num_key_value_heads = num_heads
        self.head_dim = dqk
        # vLLM then carries three numbers per token to the model: see RankingFormat.positions.
        self.mrope_section = [1, 1, 1]
        # Else vLLM would take max_sequence_length for all of a prompt, candidates included.
        kwargs.setdefault("model_max_length", max_sequence_length + MAX_CANDIDATE_TOKENS)
        kwargs.setdefault("userkv_ranking", {"candidate_offset": num_items})
        kwargs.setdefault("architectures", [ARCHITECTURE])
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
