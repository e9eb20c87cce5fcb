"""Any Qwen3-class decoder as a ranking model: candidates are isolated, and scored by a head or by log-probability."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from userkv.core.errors import UnsupportedEngineError
from userkv.models.attention.metadata import attach_plan
from userkv.models.ranking_model import RankingModel, RankingPooler
from userkv.models.scorers import HeadScorer, LogprobScorer
from userkv.ranking.prompt import RankingFormat
from userkv.ranking.spec import Scoring, ranking_section


class Qwen3Ranker(RankingModel, Qwen3ForCausalLM):
    """Qwen3 with isolated candidates.

    With ``"score": "head"`` the checkpoint has a weight ``score.weight`` ``[tasks, hidden]``, as sequence
    classification models have; with ``"logprob"`` any causal language model does.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if current_platform.is_cpu():
            from userkv.models.attention.cpu import isolate
        elif current_platform.is_cuda():
            from userkv.models.attention.cuda import isolate
        else:
            raise UnsupportedEngineError("Qwen3Ranker isolates candidates on CPU and CUDA; this device has no way yet")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        scoring = Scoring.from_config(config.to_dict())
        self.ranking_format = RankingFormat.from_config(ranking_section(config.to_dict()))
        for layer in self.model.layers:
            isolate(layer.self_attn.attn)
        if scoring.score == "head":
            self.score = nn.Linear(config.hidden_size, len(scoring.tasks), bias=False)
            self.pooler = RankingPooler(self.ranking_format, HeadScorer(self.score, len(scoring.tasks)))
        else:
            self.pooler = RankingPooler(self.ranking_format, LogprobScorer(self.compute_logits))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """As Qwen3's, with positions ``[3, rows]`` of :meth:`RankingFormat.positions`."""
        attach_plan(positions)
        return super().forward(input_ids, positions[0], intermediate_tensors, inputs_embeds)
