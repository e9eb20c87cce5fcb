"""Gets the scores of a prompt's candidates out of vLLM's engine. No other part of the endpoint knows the engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.inputs import tokens_input
from vllm.sampling_params import MAX_LOGPROB_TOKEN_IDS

from userkv.client.wire import CachedTokens, Item
from userkv.ranking.prompt import RankingPrompt
from userkv.ranking.spec import RankingSpec

User = Mapping[str, Any]
"""``kv_transfer_params`` of a request; empty: the request names no user."""


class LostScoresError(Exception):
    """The engine's answer has not exactly one usable row of scores per candidate."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What came back.

    Attributes:
        values: float64, shape ``[candidates, tasks]``, all finite.
        cached: where the history came from.

    """

    values: npt.NDArray[np.float64]
    cached: CachedTokens


class Scorer(Protocol):
    """One way to get scores. Cancelling a call aborts its requests in the engine."""

    async def score(self, prompt: RankingPrompt, candidates: Sequence[Item], user: User, request_id: str) -> Scored:
        """Score the candidates; with none, only have the history computed.

        Raises:
            LostScoresError: the engine's answer cannot be used.
            ValueError: the engine refuses the request.
            VLLMError: the engine failed.

        """


class OnePassScorer:
    """For ranking models: one forward pass gives all candidates' scores."""

    def __init__(self, engine: Any, spec: RankingSpec) -> None:
        self._engine = engine
        self._num_tasks = len(spec.tasks)

    async def score(self, prompt: RankingPrompt, candidates: Sequence[Item], user: User, request_id: str) -> Scored:
        # vLLM's own prefix cache knows no candidates: a hit in one would lose its score.
        params = PoolingParams(task="classify", extra_kwargs=_extra(user), skip_reading_prefix_cache=not user)
        output = await _last(self._engine.encode(tokens_input(prompt.token_ids), params, request_id))
        shape = (prompt.num_candidates, self._num_tasks)
        return Scored(_checked(output.outputs.data, shape), _cached(output, prompt.history_len))


class LabelScorer:
    """For stock decoders: a candidate is one token, and its score the log-probability of coming next.

    vLLM gives the log-probabilities of 128 chosen tokens at most, so more candidates are several requests, of the same
    user with the same history.
    """

    def __init__(self, engine: Any, spec: RankingSpec) -> None:
        self._engine = engine
        self._spec = spec

    async def score(self, prompt: RankingPrompt, candidates: Sequence[Item], user: User, request_id: str) -> Scored:
        labels = [self._spec.tokens(item)[0] for item in candidates]
        different = list(dict.fromkeys(labels))
        chunks = [
            different[at : at + MAX_LOGPROB_TOKEN_IDS] for at in range(0, len(different), MAX_LOGPROB_TOKEN_IDS)
        ] or [[]]
        answers = await _all(
            [self._ask(prompt, chunk, user, f"{request_id}-{number}") for number, chunk in enumerate(chunks)]
        )
        found = {label: value for values, _ in answers for label, value in values.items()}
        values = [[found.get(label, np.nan)] for label in labels]
        # The others find what the first of them has computed.
        cached = min((cached for _, cached in answers), key=lambda cached: cached.total)
        return Scored(_checked(np.array(values, np.float64).reshape(-1, 1), (len(labels), 1)), cached)

    async def _ask(
        self, prompt: RankingPrompt, labels: list[int], user: User, request_id: str
    ) -> tuple[dict[int, float], CachedTokens]:
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            logprob_token_ids=labels or None,
            flat_logprobs=True,
            detokenize=False,
            extra_args=_extra(user),
        )
        output = await _last(self._engine.generate(tokens_input(prompt.token_ids), params, request_id))
        cached = _cached(output, prompt.history_len)
        if not labels:
            return {}, cached
        logprobs = output.outputs[0].logprobs if output.outputs else None
        if not logprobs:
            raise LostScoresError("the engine returned no log-probabilities")
        # First the sampled token, then ours in their order, then whatever other requests of the batch have more.
        tokens = logprobs.token_ids[1 : 1 + len(labels)]
        if tokens != labels:
            raise LostScoresError("the engine returned log-probabilities of other tokens")
        return dict(zip(tokens, logprobs.logprobs[1 : 1 + len(labels)], strict=True)), cached


async def _last(outputs: AsyncGenerator[Any, None]) -> Any:
    last: Any = None
    async for output in outputs:
        last = output
    if last is None:
        raise LostScoresError("the engine returned nothing")
    error = getattr(last, "error", None)
    if error is not None:
        raise (RetryableRequestError if error.retryable else GenerationError)(error.message)
    return last


async def _all(calls: list[Any]) -> list[Any]:
    """All results; if one call fails, the others are cancelled, and the first failure is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _extra(user: User) -> dict[str, Any] | None:
    return {"kv_transfer_params": user} if user else None


def _checked(data: Any, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    values = np.asarray(data, np.float64)
    if values.shape != shape:
        raise LostScoresError(f"the engine returned scores of shape {list(values.shape)} instead of {list(shape)}")
    if not np.isfinite(values).all():
        lost = int((~np.isfinite(values)).any(axis=1).sum())
        raise LostScoresError(f"the engine lost the scores of {lost} of {shape[0]} candidates")
    return values


def _cached(output: Any, history_len: int) -> CachedTokens:
    tiers = getattr(output, "userkv_tiers", None)
    if tiers is None:
        tiers = {"hbm": min(output.num_cached_tokens or 0, history_len)}
    hbm, dram, ssd = (int(tiers.get(name, 0)) for name in ("hbm", "dram", "ssd"))
    return CachedTokens(hbm, dram, ssd, hbm + dram + ssd)
