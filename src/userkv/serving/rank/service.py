"""What ``/v1/rank`` does, without HTTP."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from userkv.client.request import BadFieldError
from userkv.client.wire import Item, RankInfo, RankRequest
from userkv.core.errors import InvalidUserRequestError, UserKVError
from userkv.core.request import ReadParams, UserRequest
from userkv.ranking.prompt import RankingPrompt
from userkv.ranking.spec import ItemCode, ItemTable, RankingSpec
from userkv.serving.rank.scoring import Scorer

PREFILL = "prefill"
_MAX_REQUEST_ID = 128


class UnknownModelError(UserKVError):
    """The request names a model that is not served."""


class WeightsConflictError(UserKVError):
    """The request wants other weights than those that are served."""


class WeightsVersion(Protocol):
    """Tells the version of the weights that the engine has now."""

    async def __call__(self) -> str:
        """The version's name."""


@dataclass(frozen=True, slots=True)
class RankService:
    """Ranks with one model. Requests run concurrently; nothing here changes.

    Attributes:
        spec: how the model ranks.
        scorer: runs the engine.
        names: names of the model, the first one being that of the answers.
        max_model_len: longest prompt that the engine takes, in tokens.
        users: whether the engine keeps KV by user; if not, its requests name no user.
        weights_version: asks for the version of the weights.

    """

    spec: RankingSpec
    scorer: Scorer
    names: Sequence[str]
    max_model_len: int
    users: bool
    weights_version: WeightsVersion

    async def rank(self, request: RankRequest, request_id: str | None, arrived: float) -> dict[str, Any]:
        """Answer a request; the fields of the answer are those of ``RankResult``.

        Args:
            request: the request.
            request_id: the client's name for it; ``None``: a new one.
            arrived: ``time.perf_counter()`` when it came.

        Raises:
            UserKVError: the request cannot be answered; BadFieldError and others say why.
            LostScoresError: the engine's answer cannot be used.
            VLLMError: the engine failed.

        """
        model = self._model(request.model)
        user = UserRequest.parse({"user_id": request.user_id, "stage": request.stage}, 0)
        _check_candidates(request)
        window = self.spec.history_window
        history = request.history if window is None else window.cut(request.history)
        prompt = self._prompt(history, request.candidates)
        self._check_length(request, prompt.token_ids, prompt.history_len)
        await self._check_weights(request.weights_version)
        name = f"rank-{(request_id or uuid.uuid4().hex)[:_MAX_REQUEST_ID]}"
        asked = time.perf_counter()
        scored = await self.scorer.score(prompt, request.candidates, self._user_params(user, prompt), name)
        answered = time.perf_counter()
        scores, ranking = self._scores(request, scored.values)
        labels = self.spec.format is None
        return {
            "id": name,
            "model": model,
            "scores": scores,
            "ranking": ranking,
            "usage": {
                "history_tokens": prompt.history_len,
                "cached_tokens": scored.cached,
                "candidate_tokens": len(scores) if labels else len(prompt.token_ids) - prompt.history_len,
                "history_items_dropped": len(request.history) - len(history),
            },
            "timing": {
                "total_ms": _ms(time.perf_counter() - arrived),
                "prepare_ms": _ms(asked - arrived),
                "engine_ms": _ms(answered - asked),
            },
        }

    async def info(self) -> RankInfo:
        """What the model takes."""
        window = self.spec.history_window
        form = self.spec.format
        offset = None if form is None else form.candidate_offset
        return RankInfo(
            model=self.names[0],
            score=self.spec.score,
            tasks=self.spec.tasks,
            task_weights=self.spec.task_weights,
            items=_items(self.spec.items),
            item_vocab_size=self.spec.vocab_size if offset is None else min(offset, self.spec.vocab_size),
            max_model_len=self.max_model_len,
            max_history_tokens=self.spec.max_history_tokens,
            max_item_tokens=self.spec.max_item_tokens,
            history_window=None if window is None else {"max_items": window.max_items, "drop_items": window.drop_items},
            weights_version=await self.weights_version(),
        )

    def _user_params(self, user: UserRequest | None, prompt: RankingPrompt) -> Mapping[str, Any]:
        """``kv_transfer_params`` for the engine; read here already, so that the engine's front end need not."""
        if user is None or not self.users:
            return {}
        user = replace(user, history_len=prompt.history_len)
        params = {"user_id": user.user_id, "stage": user.stage, "history_len": user.history_len}
        return ReadParams(params, user, len(prompt.token_ids))

    def _model(self, name: str | None) -> str:
        if name is not None and name not in self.names:
            served = " or ".join(repr(served) for served in self.names)
            raise UnknownModelError(f"there is no model {name[:80]!r}; this server has {served}")
        return name or self.names[0]

    def _prompt(self, history: Sequence[Item], candidates: Sequence[Item]) -> RankingPrompt:
        try:
            return self.spec.prompt(history, candidates)
        except InvalidUserRequestError as error:
            field = "candidates"
            try:
                self.spec.prompt(history, [])
            except InvalidUserRequestError:
                field = "history"
            raise BadFieldError(str(error), field) from error

    def _check_length(self, request: RankRequest, token_ids: list[int], history_len: int) -> None:
        if not token_ids:
            what = "to prefill" if request.stage == PREFILL else "that the candidates could follow"
            raise BadFieldError(f"history has no items, so there is nothing {what}; send at least one", "history")
        labels = self.spec.format is None
        # A generated token, the label, needs a place, too.
        needed = len(token_ids) + labels
        if needed > self.max_model_len:
            rest = needed - history_len
            parts = f"{history_len} tokens of history" + (f" and {rest} of candidates" if rest else "")
            raise BadFieldError(
                f"{parts} are more than the {self.max_model_len} that this server takes; send fewer, or start it with "
                "a larger --max-model-len if the model takes more",
                "history" if history_len > self.max_model_len - labels else "candidates",
            )

    async def _check_weights(self, wanted: str | None) -> None:
        if wanted is None:
            return
        served = await self.weights_version()
        if wanted != served:
            raise WeightsConflictError(
                f"this server has version {served!r} of the weights, not {wanted[:80]!r}; ask another server, or leave "
                "weights_version out"
            )

    def _scores(self, request: RankRequest, values: Any) -> tuple[list[dict[str, Any]], list[Item]]:
        totals = values @ np.asarray(self.spec.task_weights)
        # Stable, so that of equal scores the one that was sent first comes first.
        order = np.argsort(-totals, kind="stable")[: request.top_k]
        scores = [
            {"item": item, "score": score} for item, score in zip(request.candidates, totals.tolist(), strict=True)
        ]
        if len(self.spec.tasks) > 1:
            for answer, row in zip(scores, values.tolist(), strict=True):
                answer["tasks"] = dict(zip(self.spec.tasks, row, strict=True))
        return scores, [request.candidates[place] for place in order.tolist()]


def _check_candidates(request: RankRequest) -> None:
    if request.stage == PREFILL and request.candidates:
        raise BadFieldError("stage 'prefill' scores nothing; leave candidates out", "candidates")
    if request.stage != PREFILL and not request.candidates:
        raise BadFieldError(
            "candidates is empty; send at least one, or stage 'prefill' to have only the history computed", "candidates"
        )


def _items(items: Any) -> dict[str, str | int]:
    match items:
        case ItemTable(reserved=reserved, index=index):
            return {"kind": "table", "count": len(index), "reserved": reserved}
        case ItemCode(codec=codec):
            numbers = {"base": codec.base, "digits": codec.digits, "reserved": codec.reserved}
            return {"kind": "codec", "capacity": codec.capacity, **numbers}
        case _:
            return {"kind": type(items).__name__}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
