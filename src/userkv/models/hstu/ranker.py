"""The HSTU ranker in vLLM: the layers of ``reference.py``, with keys and values in the paged KV cache."""

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from userkv.core.errors import UnsupportedEngineError
from userkv.models.attention.metadata import attach_plan
from userkv.models.hstu.attention import HSTUBackend
from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTULayer, HSTUModel
from userkv.models.ranking_model import RankingModel, RankingPooler
from userkv.models.scorers import HeadScorer
from userkv.ranking.config_keys import CONFIG_KEY
from userkv.ranking.prompt import RankingFormat


class HSTURankerLayer(HSTULayer):
    """A layer whose attention is vLLM's. Parameters are those of the reference."""

    def __init__(self, config: HSTUConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(config)
        self.attention = Attention(
            config.num_heads,
            config.dqk,
            config.dqk**-0.5,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attention",
            attn_backend=HSTUBackend,
            relative_bias=self.relative_bias,
            max_sequence_length=config.max_sequence_length,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """One layer over the step's rows, ``[rows, width]``."""
        u, v, q, k = self.project(x)
        attended = self.attention(q.contiguous(), k.contiguous(), v.contiguous())
        return self.finish(x, u, attended.unflatten(-1, (self.num_heads, -1)))


class HSTURanker(RankingModel, HSTUModel):
    """HSTU as a pooling model of vLLM. One worker: a ranker of this size is not split over several."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        if vllm_config.parallel_config.world_size > 1:
            raise UnsupportedEngineError("an HSTU ranker runs on one worker; start more engines instead")
        if config.dqk != config.dv:
            raise UnsupportedEngineError(f"an HSTU ranker needs dqk == dv, not {config.dqk} and {config.dv}")
        section = getattr(config, CONFIG_KEY)
        for name, most in (
            ("max_history_tokens", config.max_sequence_length),
            ("max_item_tokens", config.max_item_tokens),
        ):
            if (section.get(name) or 0) > most:
                raise UnsupportedEngineError(
                    f"{CONFIG_KEY}: {name} is {section[name]}, but the model has {most} positions"
                )
        super().__init__(config)
        self.layers = nn.ModuleList(
            HSTURankerLayer(config, vllm_config, maybe_prefix(prefix, f"layers.{i}")) for i in range(config.num_blocks)
        )
        self.ranking_format = RankingFormat.from_config(section)
        self.pooler = RankingPooler(self.ranking_format, HeadScorer(self.logits, len(config.tasks)))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Items alone, for vLLM's interface; positions are added by :meth:`embed`."""
        return self.item_embedding(input_ids % self.config.num_items)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states of the step's rows.

        Args:
            input_ids: ``[rows]``.
            positions: int64 ``[3, rows]``, see :meth:`RankingFormat.positions`.
            intermediate_tensors: not used: there is one worker.
            inputs_embeds: not used: prompts are token ids.

        Returns:
            ``[rows, width]``.

        """
        attach_plan(positions)
        x = self.embed(input_ids, positions[0])
        for layer in self.layers:
            x = layer(x)
        return x

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the state dict of the reference."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            default_weight_loader(parameters[name], weight)
            loaded.add(name)
        return loaded
