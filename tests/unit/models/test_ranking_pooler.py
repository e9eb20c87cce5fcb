"""The pooler: scores of all candidates, however the prompt is cut into steps, and NaN where anything is missing."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.pooling_params import PoolingParams
from vllm.v1.pool.metadata import PoolingMetadata, PoolingStates

from tests.support.ranking_steps import Shape, shapes
from userkv.models.ranking_model import RankingPooler
from userkv.models.scorers import HeadScorer, LogprobScorer
from userkv.ranking.prompt import RankingFormat

OFFSET = RankingFormat(candidate_offset=100)
MARKER = RankingFormat(candidate_marker=3)
WIDTH, VOCABULARY = 8, 50
HEADS = torch.randn(WIDTH, 2, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(1))


def head_pooler() -> RankingPooler:
    return RankingPooler(OFFSET, HeadScorer(lambda hidden: hidden @ HEADS, 2))


def logprob_pooler() -> RankingPooler:
    return RankingPooler(MARKER, LogprobScorer(lambda hidden: hidden @ LOGITS))


Steps = list[tuple[int, int]]
"""From and to which token each step of a request computes."""


def run(
    pooler: RankingPooler, prompts: list[list[int]], hidden: list[torch.Tensor], steps: list[Steps]
) -> list[torch.Tensor]:
    """Pool prompts together, step by step."""
    states = [PoolingStates() for _ in prompts]
    results: dict[int, torch.Tensor] = {}
    for number in range(max(map(len, steps))):
        running = [i for i, of_request in enumerate(steps) if number < len(of_request)]
        now = [steps[i][number] for i in running]
        width = max(len(prompts[i]) for i in running)
        tokens = torch.tensor([prompts[i] + [0] * (width - len(prompts[i])) for i in running])
        metadata = PoolingMetadata(
            torch.tensor([len(prompts[i]) for i in running]),
            tokens,
            tokens,
            [PoolingParams(task="classify") for _ in running],
            [states[i] for i in running],
        )
        rows = np.array([end - first for first, end in now])
        metadata.build_pooling_cursor(rows, torch.tensor([end for _, end in now]), torch.device("cpu"))
        step_hidden = torch.cat([hidden[i][first:end] for i, (first, end) in zip(running, now, strict=True)])
        for i, output in zip(running, pooler(step_hidden, metadata), strict=True):
            if output is not None:
                assert i not in results
                results[i] = output
    return [results[i] for i in range(len(prompts))]


@st.composite
def any_steps(draw: st.DrawFn, shape: Shape, length: int) -> Steps:
    """A part of the history, at most, is cached; the rest is computed in any steps."""
    cached = draw(st.integers(0, min(shape.history_len, length - 1)))
    cuts = sorted({cached, *draw(st.lists(st.integers(cached + 1, length), max_size=4)), length})
    return list(pairwise(cuts))


def hidden_of(prompt: list[int], seed: int) -> torch.Tensor:
    return torch.randn(len(prompt), WIDTH, generator=torch.Generator().manual_seed(seed))


def marked(shape: Shape) -> list[int]:
    return [7] * shape.history_len + [token for size in shape.candidates for token in [3, *range(10, 10 + size)]]


@settings(deadline=None)
@given(st.lists(shapes(), min_size=1, max_size=3), st.data())
def test_heads_score_the_last_token_of_each_candidate(chosen: list[Shape], data: st.DataObject) -> None:
    prompts = [shape.tokens for shape in chosen]
    hidden = [hidden_of(prompt, i) for i, prompt in enumerate(prompts)]
    steps = [data.draw(any_steps(shape, len(prompt))) for shape, prompt in zip(chosen, prompts, strict=True)]
    outputs = run(head_pooler(), prompts, hidden, steps)
    for shape, rows, output in zip(chosen, hidden, outputs, strict=True):
        last = shape.history_len + np.cumsum(shape.candidates, dtype=int) - 1
        torch.testing.assert_close(output, torch.sigmoid(rows[torch.from_numpy(last)] @ HEADS))
        assert output.dtype == torch.float32


@settings(deadline=None)
@given(shapes(), st.data())
def test_log_probabilities_are_summed_over_a_candidate(shape: Shape, data: st.DataObject) -> None:
    prompt = marked(shape)
    hidden = hidden_of(prompt, 5)
    (output,) = run(logprob_pooler(), [prompt], [hidden], [data.draw(any_steps(shape, len(prompt)))])
    logprobs = (hidden @ LOGITS).log_softmax(-1)
    at, expected = shape.history_len, []
    for size in shape.candidates:
        expected.append(sum((logprobs[at + i, prompt[at + i + 1]] for i in range(size)), torch.zeros(())))
        at += size + 1
    assert output.shape == (len(shape.candidates), 1)
    if expected:
        torch.testing.assert_close(output[:, 0], torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_candidates_that_were_not_computed_have_no_score() -> None:
    shape = Shape(4, (2, 2, 2), 0, 0)
    for pooler, prompt in ((head_pooler(), shape.tokens), (logprob_pooler(), marked(shape))):
        (output,) = run(pooler, [prompt], [hidden_of(prompt, 1)], [[(7, len(prompt))]])
        assert torch.isnan(output[0]).all()
        assert torch.isfinite(output[1:]).all()


def test_a_request_that_starts_again_has_the_same_scores() -> None:
    prompt = Shape(3, (1, 2), 0, 0).tokens
    hidden = hidden_of(prompt, 2)
    (once,) = run(head_pooler(), [prompt], [hidden], [[(0, 6)]])
    (again,) = run(head_pooler(), [prompt], [hidden], [[(0, 5), (3, 6)]])  # Preempted after 5 tokens.
    torch.testing.assert_close(once, again)


def test_a_history_alone_has_no_scores() -> None:
    (output,) = run(head_pooler(), [[5, 6, 7]], [hidden_of([5, 6, 7], 3)], [[(1, 3)]])
    assert output.shape == (0, 2)
