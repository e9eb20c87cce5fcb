"""Random steps of ranking requests over a paged KV cache, and what dense attention makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from userkv.models.attention.isolation import IsolationPlan, plan_isolation
from userkv.models.hstu.reference import isolation_mask
from userkv.ranking.prompt import RankingFormat

FORMAT = RankingFormat(candidate_offset=100)


@dataclass(frozen=True)
class Shape:
    """A request: its history, the tokens of each candidate, and how much is computed before the step and by it."""

    history_len: int
    candidates: tuple[int, ...]
    computed: int
    rows: int

    @property
    def tokens(self) -> list[int]:
        """Some token ids of that shape."""
        return [1] * self.history_len + [token for size in self.candidates for token in [101] + [2] * (size - 1)]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Any request, cut anywhere."""
    history_len = draw(st.integers(0, 40))
    candidates = tuple(draw(st.lists(st.integers(1, 4), max_size=8, min_size=0 if history_len else 1)))
    total = history_len + sum(candidates)
    computed = draw(st.integers(0, total - 1))
    return Shape(history_len, candidates, computed, draw(st.integers(1, total - computed)))


@dataclass
class Step:
    """A step of several requests.

    Attributes:
        heads: of queries.
        kv_heads: of keys and values.
        size: of a head.
        block_size: tokens per block.
        query: ``[rows, heads, size]``.
        keys: of each request's whole sequence ``[tokens, kv_heads, size]``.
        values: same.
        positions: of each request's whole sequence.
        block_table: the engine's blocks.
        plan: of the step.

    """

    shapes: list[Shape]
    heads: int = 4
    kv_heads: int = 4
    size: int = 32
    block_size: int = 32
    seed: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        rows = sum(shape.rows for shape in self.shapes)
        self.query = torch.randn(rows, self.heads, self.size, generator=random)
        widest = max(-(-len(shape.tokens) // self.block_size) for shape in self.shapes)
        self.num_blocks = widest * len(self.shapes) + 1
        order = torch.randperm(self.num_blocks, generator=random)[: widest * len(self.shapes)]
        self.block_table = order.view(len(self.shapes), widest).int()
        row_starts, seq_lens, step_positions = [0], [], []
        for shape in self.shapes:
            positions = torch.from_numpy(FORMAT.positions(shape.tokens))
            self.positions.append(positions)
            for store in (self.keys, self.values):
                store.append(torch.randn(len(shape.tokens), self.kv_heads, self.size, generator=random))
            row_starts.append(row_starts[-1] + shape.rows)
            seq_lens.append(shape.computed + shape.rows)
            step_positions.append(positions[:, shape.computed : shape.computed + shape.rows])
        self.plan: IsolationPlan = plan_isolation(
            torch.cat(step_positions, 1), row_starts, seq_lens, self.block_table, self.block_size
        )

    def write(self, put: Callable[[int, int, torch.Tensor, torch.Tensor], None]) -> None:
        """Fill a cache with what is there by the end of the step: ``put(block, offset, key, value)`` for each token."""
        for number, shape in enumerate(self.shapes):
            for at in range(shape.computed + shape.rows):
                block = int(self.block_table[number, at // self.block_size])
                put(block, at % self.block_size, self.keys[number][at], self.values[number][at])

    def dense(self, weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What the step's rows attend to without any cache.

        Args:
            weigh: from scores ``[heads, rows, keys]``, mask ``[rows, keys]`` and distance, to weights.

        """
        outputs, first = [], 0
        for number, shape in enumerate(self.shapes):
            end = shape.computed + shape.rows
            mask = isolation_mask(self.positions[number])[shape.computed : end, :end]
            logical = self.positions[number][0]
            distance = (logical[shape.computed : end, None] - logical[:end]).clamp(min=0)
            repeat = self.heads // self.kv_heads
            keys = self.keys[number][:end].repeat_interleave(repeat, 1)
            values = self.values[number][:end].repeat_interleave(repeat, 1)
            query = self.query[first : first + shape.rows]
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self.size**-0.5
            outputs.append(torch.einsum("hqk,khd->qhd", weigh(scores, mask, distance), values))
            first += shape.rows
        return torch.cat(outputs)
