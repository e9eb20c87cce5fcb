"""How a step's plan reaches the attention layers: it travels in vLLM's attention metadata."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from userkv.models.attention.isolation import IsolationPlan, plan_isolation


@dataclass(kw_only=True)
class Planned:
    """What attention metadata of a ranking model has besides vLLM's.

    Attributes:
        row_starts: where each request's rows begin, and where the last one's end.
        seq_lens_list: tokens of each request by the end of the step.
        block_size: tokens per block.
        isolation: the plan, once the model has made it.

    """

    row_starts: list[int]
    seq_lens_list: list[int]
    block_size: int
    isolation: IsolationPlan | None = None


def facts_of(common: CommonAttentionMetadata, block_size: int) -> dict[str, Any]:
    """The arguments of :class:`Planned` for a step. On a GPU the lengths' way to the host is a synchronisation."""
    return {
        "row_starts": common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
        "seq_lens_list": common.seq_lens[: common.num_reqs].tolist(),
        "block_size": block_size,
    }


def fields_of(metadata: Any) -> dict[str, Any]:
    """What vLLM has put into its metadata."""
    return {field.name: getattr(metadata, field.name) for field in fields(metadata)}


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


def plan_of(metadata: Planned) -> IsolationPlan:
    """The plan of the step.

    Raises:
        RuntimeError: the model has made none.

    """
    if metadata.isolation is None:
        raise RuntimeError("the model did not call attach_plan(), so candidates would see each other")
    return metadata.isolation
