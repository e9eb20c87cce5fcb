"""The share of the KV blocks that ordinary prefixes get beside users: on its own, and in vLLM's scheduler."""

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from userkv.cache.block_table import UserBlockTable
from userkv.cache.prefix_share import LOADED, STEP, PrefixShare
from userkv.core.request import UserKey

BLOCKS = 64


def ordinary(share: PrefixShare, prompt: str, cached: int = 0) -> None:
    """A request whose blocks have one letter each."""
    hashes = [prompt[: end + 1] for end in range(len(prompt))]
    share.count_ordinary_start(hashes[cached:])
    share.count_ordinary_end(hashes)


def user(share: PrefixShare, name: str, blocks: int, held: int = 0, loaded: int = 0) -> None:
    share.count_user_request(UserKey(name), blocks, held, loaded)


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
    user(share, "u", 8, held=8)
    assert share.blocks == before
    user(share, "u", 12, held=2)
    assert share.blocks == before - STEP * 6, "what is new in his history was not lost"
    user(share, "u", 12, held=0, loaded=8)
    assert share.blocks == int(before - STEP * 6 - STEP * (4 + 8 * LOADED))


requests = st.one_of(
    st.tuples(st.just("ordinary"), st.text("ab", max_size=30), st.integers(0, 30)),
    st.tuples(st.just("user"), st.sampled_from("abcdefgh"), st.integers(0, 40)),
    st.tuples(st.just("fit"), st.just(""), st.integers(0, BLOCKS)),
    st.just(("forget", "", 0)),
)


@given(st.lists(requests, max_size=60))
def test_it_stays_between_nothing_and_everything_and_remembers_no_more_than_fits(
    steps: list[tuple[str, str, int]],
) -> None:
    share = PrefixShare(BLOCKS, max_users=5)
    for kind, name, number in steps:
        if kind == "ordinary":
            ordinary(share, name, min(number, len(name)))
        elif kind == "user":
            user(share, name, number, number // 3, number // 4)
        elif kind == "fit":
            share.set_room(number)
            assert share.blocks <= number
        else:
            share.forget()
        assert 0 <= share.blocks <= BLOCKS
        assert len(share._prefixes) <= BLOCKS
        assert len(share._users) <= 5
        assert share._users_blocks == sum(share._users.values()) <= BLOCKS


def test_what_running_requests_hold_can_be_given_to_nobody() -> None:
    """Prompts that come in turns, more than there is room for: nothing would keep them, so they take nothing."""
    share = PrefixShare(BLOCKS)
    for _ in range(4):
        share.set_room(8)
        for prompt in "abc":
            ordinary(share, prompt * 8)
    assert share.blocks == 0
    for _ in range(4):
        share.set_room(24)
        for prompt in "abc":
            ordinary(share, prompt * 8)
    assert 0 < share.blocks <= 24


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


@pytest.mark.parametrize(
    ("async_scheduling", "pool"), [(False, None), (True, None), (False, "async"), (True, "async"), (False, "layerwise")]
)
def test_answers_stay_right_when_users_go_for_the_share(
    async_scheduling: bool, pool: str | None, patched_vllm: pytest.MonkeyPatch
) -> None:
    """Several requests at once, in pieces, half of them ordinary; the oracle checks each KV slot that is read."""
    from tests.support.oracle import OracleEngine, expected_output

    patched_vllm.setattr(PrefixShare, "blocks", 24)
    evicted: list[int] = []
    evict = UserBlockTable.evict
    patched_vllm.setattr(UserBlockTable, "evict", lambda table, most: evicted.append(evict(table, most)) or evicted[-1])
    rng = Random(1)
    engine = OracleEngine(65, async_scheduling, long_prefill_threshold=7, pool=pool)
    prompts = {}
    for number in range(90):
        who = min(int(rng.paretovariate(0.6)), 12)
        rest = [rng.randrange(5) for _ in range(3)]
        if number % 2:
            prompt, params = [*opening(rng), *rest], None
        else:
            prompt = [100 + who] * (20 + who) + rest
            params = {"user_id": f"u{who}", "history_len": 20 + who}
        prompts[engine.add(prompt, 3, params)] = prompt
        while len(engine.requests) > 3:
            engine.step()
    engine.drain()
    assert sum(evicted) > 64, "more blocks than there are"
    assert any(engine.cached[request] > 0 for request in prompts)
    assert all(engine.outputs[request] == expected_output(prompt, 3) for request, prompt in prompts.items())


def test_prompts_that_never_come_again_take_nothing_from_users(patched_vllm: pytest.MonkeyPatch) -> None:
    fresh = count(100_000)
    shared, engine = hits_of(200, named=True, prompt=lambda rng: [next(fresh)] * 24)
    assert engine.users.share.blocks == 0
    patched_vllm.setattr(PrefixShare, "blocks", 0)
    assert hits_of(200, named=True, prompt=lambda rng: [next(fresh)] * 24)[0] == shared > 0


@pytest.mark.parametrize("length", [24, 27, 28])
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_request_counts_once_and_what_is_cached_is_not_lost(
    max_tokens: int, length: int, patched_vllm: pytest.MonkeyPatch
) -> None:
    """However many steps it takes to compute its prompt and its output, and wherever its last block ends."""
    from tests.support.oracle import OracleEngine

    told = watched(patched_vllm)
    engine = OracleEngine(40, async_scheduling=False, long_prefill_threshold=5)
    for _ in range(3):
        engine.add([1, 2, 3, 4] * 7 if length == 28 else [1, 2, 3] * 9 if length == 27 else [1, 2] * 12, max_tokens)
        engine.drain()
    assert told == [(length - 1) // 4, 0, 0]
    assert engine.users.share.blocks == 0


def test_who_is_preempted_counts_once(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    told = watched(patched_vllm)
    engine = OracleEngine(17, async_scheduling=False)
    for number in range(4):
        engine.add([10 * number + i for i in range(12)], 20)
    requests = list(engine.requests.values())
    engine.drain()
    assert any(request.num_preemptions for request in requests)
    assert told == [11 // 4] * 4
    assert engine.users.share.blocks == 0


def test_a_user_whose_history_has_changed_has_lost_nothing_to_others(patched_vllm: pytest.MonkeyPatch) -> None:
    from tests.support.oracle import OracleEngine

    engine = OracleEngine(40, async_scheduling=False)
    engine.users.share._share = 9.0
    for first in range(3):
        for _ in range(2):
            engine.add([*range(first, first + 17)], 1, {"user_id": "u", "history_len": 17})
            engine.drain()
    assert engine.users.share.blocks == 9


def test_a_number_of_free_blocks_that_is_set_is_not_learned(patched_vllm: pytest.MonkeyPatch) -> None:
    patched_vllm.setenv("VLLM_USER_KV_LRU_MIN_FREE_BLOCKS", "1")
    assert hits_of(60, named=True, prompt=opening)[1].users.share.blocks == 0


def watched(patch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each ordinary request that starts does not find, of those that it might have."""
    told: list[int] = []
    original = PrefixShare.count_ordinary_start

    def starts(share: PrefixShare, block_hashes: Any) -> None:
        told.append(len(block_hashes))
        original(share, block_hashes)

    patch.setattr(PrefixShare, "count_ordinary_start", starts)
    return told


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
