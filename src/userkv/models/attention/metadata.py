"""How a step's plan reaches the attention layers: it travels in vLLM's attention metadata."""

from typing import Any, Protocol

import torch
from vllm.forward_context import get_forward_context

from userkv.models.attention.isolation import IsolationPlan, plan_isolation


class PlannedMetadata(Protocol):
    """Attention metadata that can carry a plan."""

    isolation: IsolationPlan | None
    row_starts: list[int]
    seq_lens_list: list[int]
    block_table: torch.Tensor
    block_size: int


def attach_plan(positions: torch.Tensor) -> None:
    """Plan the step that is being computed. Called by a model before its first layer.

    Args:
        positions: int64 ``[3, rows]``, see :meth:`RankingFormat.positions`.

    """
    by_layer: Any = get_forward_context().attn_metadata
    if not by_layer:
        return  # vLLM measures memory, or warms up.
    for metadata in {id(each): each for each in by_layer.values()}.values():
        metadata.isolation = plan_isolation(
            positions, metadata.row_starts, metadata.seq_lens_list, metadata.block_table, metadata.block_size
        )


def plan_of(metadata: PlannedMetadata) -> IsolationPlan:
    """The plan of the step.

    Raises:
        RuntimeError: the model has made none.

    """
    if metadata.isolation is None:
        raise RuntimeError("the model did not call attach_plan(), so candidates would see each other")
    return metadata.isolation
