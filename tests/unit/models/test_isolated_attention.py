"""Attention with isolated candidates over a paged cache equals dense attention with a mask, for any cut of any step."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ranking_steps import FORMAT, Shape, Step, shapes
from userkv.models.attention.cpu import attend
from userkv.models.attention.flash import attend_candidates
from userkv.models.attention.isolation import plan_isolation
from userkv.models.attention.silu import silu_attention

steps = st.lists(shapes(), min_size=1, max_size=4)


class TestSilu:
    """HSTU."""

    @settings(deadline=None)
    @given(steps, st.booleans(), st.integers(0, 9))
    def test_equals_dense(self, chosen: list[Shape], with_bias: bool, seed: int) -> None:
        step = Step(chosen, seed=seed, block_size=16)
        bias = torch.randn(64, generator=torch.Generator().manual_seed(seed)) if with_bias else None

        def weigh(scores: torch.Tensor, mask: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
            return F.silu(scores + (0 if bias is None else bias[distance])) * mask / 50

        torch.testing.assert_close(silu(step, bias), step.dense(weigh), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("shape", [Shape(300, (1,) * 200, 0, 500), Shape(300, (2,) * 100, 150, 340)])
    def test_more_rows_than_a_tile(self, shape: Shape) -> None:
        step = Step([shape])
        bias = torch.randn(400)

        def weigh(scores: torch.Tensor, mask: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
            return F.silu(scores + bias[distance]) * mask / 50

        torch.testing.assert_close(silu(step, bias), step.dense(weigh), atol=1e-5, rtol=1e-5)


def silu(step: Step, bias: torch.Tensor | None) -> torch.Tensor:
    cache = torch.full((step.num_blocks, step.heads, step.block_size, 2 * step.size), 1e6)

    def put(block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache[block, :, offset] = torch.cat((key, value), -1)

    step.write(put)
    out = torch.full_like(step.query, torch.nan)
    silu_attention(step.query, cache, step.plan, step.size**-0.5, bias, 50.0, out)
    return out


class TestSoftmax:
    """Decoders on a CPU: rows of candidates."""

    @settings(deadline=None)
    @given(steps, st.sampled_from([1, 2, 4]), st.integers(0, 9))
    def test_candidates_equal_dense(self, chosen: list[Shape], kv_heads: int, seed: int) -> None:
        step = Step(chosen, kv_heads=kv_heads, seed=seed)
        cache = torch.full((step.num_blocks, kv_heads, step.block_size, 2 * step.size), 1e6)
        halves = cache.view(step.num_blocks, kv_heads, 2, -1)
        keys = halves[:, :, 0].view(step.num_blocks, kv_heads, step.size, step.block_size)
        values = halves[:, :, 1].view(step.num_blocks, kv_heads, step.block_size, step.size)

        def put(block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
            keys[block, :, :, offset] = key
            values[block, :, offset] = value

        step.write(put)

        def weigh(scores: torch.Tensor, mask: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(~mask, -torch.inf).softmax(-1)

        dense = step.dense(weigh)
        for candidates in step.plan.candidates:
            out = attend(step.query[candidates.rows], cache, candidates, step.size**-0.5)
            torch.testing.assert_close(out, dense[candidates.rows], atol=1e-5, rtol=1e-5)

    def test_scores_far_apart_do_not_overflow(self) -> None:
        step = Step([Shape(5, (2, 1), 5, 3)], kv_heads=4)
        step.query *= 1e4
        cache = torch.zeros(step.num_blocks, 4, step.block_size, 2 * step.size)
        (candidates,) = step.plan.candidates
        out = attend(step.query, cache, candidates, 1.0)
        assert torch.isfinite(out).all()


class TestFlash:
    """Decoders on CUDA: all but the kernel."""

    @settings(deadline=None)
    @given(steps, st.sampled_from([1, 2, 4]), st.integers(0, 9))
    def test_candidates_equal_dense(self, chosen: list[Shape], kv_heads: int, seed: int) -> None:
        step = Step(chosen, kv_heads=kv_heads, seed=seed)
        cache = torch.full((step.num_blocks, kv_heads, step.block_size, 2 * step.size), 1e6)

        def put(block: int, offset: int, key: torch.Tensor, value: torch.Tensor) -> None:
            cache[block, :, offset] = torch.cat((key, value), -1)

        step.write(put)
        out = torch.full_like(step.query, torch.nan)
        attend_candidates(step.query, cache, step.plan, step.size**-0.5, stand_in, out)
        dense = step.dense(lambda scores, mask, distance: scores.masked_fill(~mask, -torch.inf).softmax(-1))
        for candidates in step.plan.candidates:
            torch.testing.assert_close(out[candidates.rows], dense[candidates.rows], atol=1e-5, rtol=1e-5)


def stand_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flash_attn_varlen_func returns, computed plainly."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for number, size in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[number : number + 2].tolist()
        assert last - first <= max_seqlen_q
        assert size <= max_seqlen_k
        blocks = block_table[number, : -(-size // k.shape[1])].long()
        repeat = q.shape[1] // k.shape[2]
        keys = k[blocks].flatten(0, 1)[:size].repeat_interleave(repeat, 1)
        values = v[blocks].flatten(0, 1)[:size].repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * softmax_scale
        lse[:, first:last] = scores.logsumexp(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse


class TestPlan:
    """Which rows are where."""

    @given(steps, st.integers(0, 9))
    def test_every_row_is_in_one_part(self, chosen: list[Shape], seed: int) -> None:
        step = Step(chosen, seed=seed)
        rows = [row for history in step.plan.histories for row in range(history.first, history.last)]
        rows += [row for candidates in step.plan.candidates for row in candidates.rows.tolist()]
        assert sorted(rows) == list(range(len(step.query)))

    def test_requests_behind_one_history_are_one(self) -> None:
        positions = torch.from_numpy(FORMAT.positions([1] * 40 + [101, 102, 103]))
        tables = torch.tensor([[5, 6], [5, 6], [5, 7]])
        plan = plan_isolation(positions[:, 40:].repeat(1, 3), [0, 3, 6, 9], [43, 43, 43], tables, 32)
        assert [candidates.rows.tolist() for candidates in plan.candidates] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
        assert plan.candidates[0].blocks.tolist() == [5, 6]
