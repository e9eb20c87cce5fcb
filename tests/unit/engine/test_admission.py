"""Each request is read and checked once per process, whichever way it takes through vLLM's front end."""

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.inputs import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from userkv.core.errors import InvalidUserRequestError
from userkv.core.request import ReadParams, UserRequest
from userkv.engine import admission
from userkv.engine.request_adapter import cache_request_of
from userkv.ranking.prompt import RankingFormat, RankingPrompt
from userkv.serving.rank.scoring import LostScoresError, OnePassScorer

PROMPT = [5, 6, 7, 105, 108]
USER = {"user_id": "u", "history_len": 3}
RANKER = SimpleNamespace(
    hf_config=SimpleNamespace(userkv_ranking={"candidate_offset": 100, "items": {"kind": "codec"}}),
    get_vocab_size=lambda: 200,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a user part was parsed, and a prompt checked in time that grows with it."""
    counts: Counter[str] = Counter()
    parse, check = UserRequest.parse.__func__, RankingFormat.check  # type: ignore[attr-defined]

    def counted_parse(cls: type, *args: Any) -> Any:
        counts["parse"] += 1
        return parse(cls, *args)

    def counted_check(self: RankingFormat, *args: Any) -> None:
        counts["check"] += 1
        check(self, *args)

    monkeypatch.setattr(UserRequest, "parse", classmethod(counted_parse))
    monkeypatch.setattr(RankingFormat, "check", counted_check)
    return counts


class FrontEnd:
    """The way of a request through vLLM's front end, as far as it matters here: parameters are copied deeply."""

    def __init__(self) -> None:
        self.admitted: list[EngineCoreRequest] = []

    def process_inputs(self, prompt: Any, params: Any, **fields: Any) -> EngineCoreRequest:
        params = copy.deepcopy(params)
        sampling, pooling = (params, None) if isinstance(params, SamplingParams) else (None, params)
        token_ids = prompt["prompt_token_ids"]
        request = EngineCoreRequest("r", token_ids, None, sampling, pooling, 0.0, None, None, None, **fields)
        admission.admit(RANKER, prompt, request)  # type: ignore[arg-type]
        self.admitted.append(request)
        return request

    def generate(self, prompt: Any, params: SamplingParams) -> EngineCoreRequest:
        return self.process_inputs(admission.admit_early(RANKER, prompt, params, None), params)  # type: ignore[arg-type]

    def encode(self, prompt: Any, params: PoolingParams, request_id: str = "r") -> AsyncIterator[Any]:
        admitted = admission.admit_early(RANKER, prompt, None, params)  # type: ignore[arg-type]

        async def outputs() -> AsyncIterator[Any]:
            self.process_inputs(admitted, params)
            return
            yield

        return outputs()


def sampling(params: Any) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": params})


def pooling(params: Any) -> PoolingParams:
    return PoolingParams(task="classify", extra_kwargs={"kv_transfer_params": params} if params else None)


async def drain(outputs: AsyncIterator[Any]) -> None:
    async for _ in outputs:
        pass


def completion(front: FrontEnd) -> None:
    front.generate(tokens_input(PROMPT), sampling(USER))


def pooling_request(front: FrontEnd) -> None:
    asyncio.run(drain(front.encode(tokens_input(PROMPT), pooling(USER))))


def offline(front: FrontEnd) -> None:
    front.process_inputs(tokens_input(PROMPT), pooling(USER))


def rank_request(front: FrontEnd) -> None:
    scorer = OnePassScorer(front, SimpleNamespace(tasks=["score"]))  # type: ignore[arg-type]
    user = ReadParams(USER, UserRequest.parse(USER, len(PROMPT)), len(PROMPT))
    with pytest.raises(LostScoresError, match="nothing"):
        asyncio.run(scorer.score(RankingPrompt(PROMPT, 3, 2), [5, 8], user, "r"))


WAYS = [completion, pooling_request, offline, rank_request]


@pytest.mark.parametrize("way", WAYS)
def test_a_front_end_reads_and_checks_a_request_once(way: Any, calls: Counter[str]) -> None:
    way(FrontEnd())
    assert calls == {"parse": 1, "check": 1}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_in_the_same_process_reads_nothing_again(way: Any, calls: Counter[str]) -> None:
    front = FrontEnd()
    way(front)
    cache_request = cache_request_of(Request.from_engine_core_request(front.admitted[0], None))
    assert cache_request is not None
    assert cache_request.request == UserRequest("u", 3)
    assert calls == {"parse": 1, "check": 1}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_in_another_process_reads_the_plain_parameters_once(way: Any, calls: Counter[str]) -> None:
    front = FrontEnd()
    way(front)
    received = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(front.admitted[0]))
    request = Request.from_engine_core_request(received, None)
    calls.clear()
    for _ in range(2):
        cache_request = cache_request_of(request)
        assert cache_request is not None
        assert cache_request.request == UserRequest("u", 3)
    assert calls == {"parse": 1}


def test_a_prompt_that_vllm_changed_is_checked_again(calls: Counter[str]) -> None:
    front = FrontEnd()
    prompt = admission.admit_early(RANKER, tokens_input(PROMPT), None, pooling(USER))  # type: ignore[arg-type]
    params = pooling(USER)
    request = EngineCoreRequest("r", PROMPT[-3:], None, None, params, 0.0, None, None, None)
    with pytest.raises(InvalidUserRequestError, match="history_len"):
        admission.admit(RANKER, prompt, request)  # type: ignore[arg-type]
    assert calls == {"parse": 2, "check": 2}
    assert not front.admitted


def test_parameters_that_were_read_for_another_prompt_are_read_again() -> None:
    short = ReadParams({"user_id": "u"}, UserRequest("u", 2), 2)
    front = FrontEnd()
    front.process_inputs(tokens_input(PROMPT[:3]), pooling(short))
    extra = front.admitted[0].pooling_params.extra_kwargs  # type: ignore[union-attr]
    assert extra["kv_transfer_params"].user == UserRequest("u", 3)  # type: ignore[index]


def test_requests_that_share_their_parameters_do_not_share_what_was_read() -> None:
    params = sampling({"user_id": "u"})
    front = FrontEnd()
    requests = [front.process_inputs(tokens_input(PROMPT[:length]), params) for length in (1, 3)]
    histories = [cache_request_of(Request.from_engine_core_request(request, None)) for request in requests]
    assert [len(found.history) for found in histories if found is not None] == [1, 3]
    assert type(params.extra_args["kv_transfer_params"]) is dict  # type: ignore[index]


def test_only_a_ranking_request_without_a_user_stays_away_from_the_prefix_cache() -> None:
    front = FrontEnd()
    asyncio.run(drain(front.encode(tokens_input(PROMPT), pooling(None))))
    asyncio.run(drain(front.encode(tokens_input(PROMPT), pooling(USER))))
    skips = [bool(request.pooling_params.skip_reading_prefix_cache) for request in front.admitted]  # type: ignore[union-attr]
    assert skips == [True, False]


@pytest.mark.parametrize("params", [{"user_id": 7}, {"user_id": "u", "history_len": 2}, {"user": "u"}])
def test_a_bad_request_is_refused_before_its_answer_begins(params: dict[str, Any]) -> None:
    front = FrontEnd()
    with pytest.raises(InvalidUserRequestError):
        front.encode(tokens_input(PROMPT), pooling(params))  # No output was asked for yet.
    with pytest.raises(InvalidUserRequestError):
        front.process_inputs(tokens_input(PROMPT), pooling(params))
    assert not front.admitted


def test_images_are_refused_early() -> None:
    prompt = {**tokens_input(PROMPT), "type": "multimodal"}
    with pytest.raises(InvalidUserRequestError, match="images"):
        admission.admit_early(RANKER, prompt, sampling(USER), None)  # type: ignore[arg-type]
