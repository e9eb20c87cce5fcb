"""The share of the KV blocks that ordinary prefixes get beside users: on its own, and in vLLM's scheduler."""

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.core import prefix_share
from userkv.core.prefix_share import LOADED, STEP, PrefixShare
from userkv.core.request import UserKey

BLOCKS = 64


def ordinary(share: PrefixShare, prompt: str, cached: int = 0) -> None:
    share.ordinary_request([prompt[: end + 1] for end in range(len(prompt))], cached)


def user(share: PrefixShare, name: str, blocks: int, cached: int = 0, loaded: int = 0) -> None:
    share.user_request(UserKey(name), blocks, cached, loaded)


def test_a_prefix_that_is_computed_again_moves_the_share_and_one_that_never_comes_again_does_not() -> None:
    share = PrefixShare(BLOCKS)
    for prompt in ("aaaa1", "bbbb2", "cccc3"):
        ordinary(share, prompt)
    assert share.blocks == 0
    for rest in range(4):
        ordinary(share, f"aaaa{rest}x", cached=0)
    assert share.blocks == int(STEP * (4 + 5 + 4 + 4)), "the second one has a fifth block in common with the first"
    ordinary(share, "aaaa9", cached=4)
    assert share.blocks == int(STEP * 17), "what is cached is not lost"


def test_a_user_who_is_computed_again_moves_it_back_and_one_who_is_loaded_less_so() -> None:
    share = PrefixShare(BLOCKS)
    for _ in range(5):
        ordinary(share, "a" * 16)
    before = share.blocks
    user(share, "u", 8)
    assert share.blocks == before, "his first request"
    user(share, "u", 8, cached=8)
    assert share.blocks == before
    user(share, "u", 12, cached=2)
    assert share.blocks == before - STEP * 6, "what is new in his history was not lost"
    user(share, "u", 12, cached=0, loaded=8)
    assert share.blocks == int(before - STEP * 6 - STEP * (4 + 8 * LOADED))


def test_it_stays_between_nothing_and_everything_and_remembers_no_more_than_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_share, "MOST_USERS", 5)
    requests = st.one_of(
        st.tuples(st.just("ordinary"), st.text("ab", max_size=30), st.integers(0, 30)),
        st.tuples(st.just("user"), st.sampled_from("abcdefgh"), st.integers(0, 40)),
        st.just(("forget", "", 0)),
    )

    @given(st.lists(requests, max_size=60))
    def check(steps: list[tuple[str, str, int]]) -> None:
        share = PrefixShare(BLOCKS)
        for kind, name, number in steps:
            if kind == "ordinary":
                ordinary(share, name, min(number, len(name)))
            elif kind == "user":
                user(share, name, number, number // 3, number // 4)
            else:
                share.forget()
            assert 0 <= share.blocks <= BLOCKS
            assert len(share._prefixes) <= BLOCKS
            assert len(share._users) <= 5
            assert share._users_blocks == sum(share._users.values()) <= BLOCKS

    check()


def test_a_reset_is_nobodys_loss() -> None:
    share = PrefixShare(BLOCKS)
    ordinary(share, "aaaa")
    user(share, "u", 8)
    share.forget()
    ordinary(share, "aaaa")
    assert share.blocks == 0
    ordinary(share, "aaaa")
    before = share.blocks
    share.forget()
    user(share, "u", 8)
    assert share.blocks == before > 0


def hits_of(requests: int, *, named: bool, prompt: Callable[[Random], list[int]]) -> tuple[float, Any]:
    """Tokens that vLLM's scheduler finds, as a share of all, where every second request is ``prompt``; the engine.

    The others are of 30 users, some of them more active, with room for a quarter of their histories.
    """
    from tests.support.oracle import OracleEngine

    rng, fresh = Random(0), count(1000)
    engine = OracleEngine(81, async_scheduling=False)
    found = total = 0
    for number in range(requests):
        who = min(int(rng.paretovariate(0.6)), 30)
        if number % 2:
            tokens, params = prompt(rng), None
        else:
            tokens = [100 + who] * (32 + who % 13)
            params = {"user_id": f"u{who}", "history_len": len(tokens)} if named else None
        request = engine.add([*tokens, next(fresh), next(fresh)], 1, params)
        engine.drain()
        found += engine.cached[request]
        total += len(tokens) + 2
    return found / total, engine


def opening(rng: Random) -> list[int]:
    """One of five that many requests begin with."""
    return [50 + rng.randrange(5)] * 24


def test_openings_that_many_begin_with_stay_beside_users(patched_vllm: pytest.MonkeyPatch) -> None:
    stock, _ = hits_of(300, named=False, prompt=opening)
    shared, engine = hits_of(300, named=True, prompt=opening)
    assert 20 <= engine.users.share.blocks <= 60
    patched_vllm.setattr(PrefixShare, "blocks", 0)
    greedy, _ = hits_of(300, named=True, prompt=opening)
    assert greedy < stock < shared
    assert shared > greedy + 0.1


def test_prompts_that_never_come_again_take_nothing_from_users(patched_vllm: pytest.MonkeyPatch) -> None:
    fresh = count(100_000)
    shared, engine = hits_of(200, named=True, prompt=lambda rng: [next(fresh)] * 24)
    assert engine.users.share.blocks == 0
    patched_vllm.setattr(PrefixShare, "blocks", 0)
    assert hits_of(200, named=True, prompt=lambda rng: [next(fresh)] * 24)[0] == shared > 0


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_request_counts_once(max_tokens: int, patched_vllm: pytest.MonkeyPatch) -> None:
    """However many steps it takes to compute its prompt and its output."""
    from tests.support.oracle import OracleEngine

    told: list[int] = []
    patched_vllm.setattr(PrefixShare, "ordinary_request", lambda share, hashes, cached: told.append(cached))
    engine = OracleEngine(40, async_scheduling=False, long_prefill_threshold=5)
    engine.add([1, 2, 3] * 9, max_tokens)
    engine.drain()
    engine.add([1, 2, 3] * 9, max_tokens)
    engine.drain()
    assert told == [0, 26 // 4]


def test_where_users_go_only_for_requests_nothing_is_kept_free(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    patched_vllm.setattr(PrefixShare, "blocks", 20)
    for limits in ("1", "0"):
        patched_vllm.setenv("VLLM_ENABLE_USER_KV_LRU", limits)
        engine = OracleEngine(37, async_scheduling=False)
        for who in range(9):
            engine.add([who] * 16 + [99], 1, {"user_id": f"u{who}", "history_len": 16})
            engine.drain()
        assert (engine.users.table.num_blocks <= 16 + 4) == (limits == "1")
