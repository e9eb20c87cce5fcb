"""Engines on a real Mooncake pool: they share users, and survive whatever happens to it."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.engine import Answer, Ask, Engine, metric, random_tokens
from tests.support.mooncake import Master, Server, owner
from tests.support.pool_engine import assert_same, history_of, pool_engine, save_and_leave_hbm, saved, wait_for
from userkv.core.sizes import MIB

pytestmark = pytest.mark.e2e

PATIENCE = 12.0
"""Seconds that a request may take at most when the pool is in trouble: a transfer that hangs is given up after 4."""


@dataclass
class Cluster:
    """A master, a process that lends memory, and two engines that lend none."""

    master: Master
    owner: Server
    first: Engine
    second: Engine

    def new_owner(self) -> None:
        self.owner = owner(self.master, 256 * MIB)


def options(master: Master, **more: Any) -> dict[str, Any]:
    return {
        "backend": "mooncake",
        "master_server_address": f"127.0.0.1:{master.port}",
        "global_segment_size": 0,
        **more,
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as monkeypatch, Master() as master, owner(master, 256 * MIB) as lender:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0")
        with pool_engine(options(master)) as first:
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
            with pool_engine(options(master)) as second:
                cluster = Cluster(master, lender, first, second)
                yield cluster
                cluster.owner.kill()


def users(prefix: str, count: int = 3) -> list[Ask]:
    return [Ask(history_of(f"{prefix}-{i}", 500 + 90 * i), [20 + i, 40], f"{prefix}-{i}") for i in range(count)]


def one_by_one(engine: Engine, asks: list[Ask]) -> list[int]:
    """Ask each in time and get the right answer; how many tokens came from the cache."""
    answers: list[Answer] = []
    for ask in asks:
        start = time.monotonic()
        (answer,) = engine.ask(ask)
        assert time.monotonic() - start < PATIENCE
        answers.append(answer)
    for answer, expected in zip(answers, engine.ask_without_cache(*asks), strict=True):
        assert answer.equals(expected)
    return [answer.cached for answer in answers]


def lengths(asks: list[Ask]) -> list[int]:
    return [len(ask.history) for ask in asks]


def until_hits_return(engine: Engine, prefix: str) -> None:
    """After trouble, users are saved and loaded again before long."""
    deadline = time.monotonic() + 60
    attempt = 0
    while time.monotonic() < deadline:
        attempt += 1
        asks = users(f"{prefix}-{attempt}", 1)
        one_by_one(engine, asks)
        time.sleep(1)
        for filler in range(2):
            engine.ask(Ask(random_tokens(random.Random(), 1400), [20], f"{prefix}-filler-{attempt}-{filler}"))
        if one_by_one(engine, asks) == lengths(asks):
            return
    raise AssertionError("no hit for a minute")


def test_what_one_engine_computed_the_other_loads(cluster: Cluster) -> None:
    asks = users("shared")
    before = saved()
    assert one_by_one(cluster.first, asks) == [0, 0, 0]
    wait_for(lambda: saved() == before + 3, cluster.first)
    assert one_by_one(cluster.second, asks) == lengths(asks)
    grown = [Ask([*ask.history, *history_of("more", 55)], [30], ask.user) for ask in asks]
    assert one_by_one(cluster.second, grown) == lengths(asks)
    wait_for(lambda: saved() == before + 6, cluster.second)
    save_and_leave_hbm(cluster.first, [])
    assert one_by_one(cluster.first, grown) == lengths(grown)


def test_the_master_freezes(cluster: Cluster) -> None:
    asks = users("frozen")
    save_and_leave_hbm(cluster.first, asks)
    cluster.master.freeze()
    try:
        start = time.monotonic()
        one_by_one(cluster.first, [*asks, *users("cold", 5)])
        # The breaker opens: not every request waits for a time-out.
        assert time.monotonic() - start < 25
        wait_for(lambda: metric("userkv_pool_breaker_open") >= 1, cluster.first)
    finally:
        cluster.master.thaw()
    until_hits_return(cluster.first, "thawed")


def test_the_master_dies_and_comes_back(cluster: Cluster) -> None:
    asks = users("orphan")
    save_and_leave_hbm(cluster.first, asks)
    cluster.master.kill()
    one_by_one(cluster.first, asks)
    one_by_one(cluster.second, asks)
    cluster.master.start()
    until_hits_return(cluster.first, "restarted")
    until_hits_return(cluster.second, "restarted-second")


def test_the_owner_of_the_memory_dies(cluster: Cluster) -> None:
    asks = users("lost", 4)
    save_and_leave_hbm(cluster.first, asks)
    cluster.owner.kill()
    one_by_one(cluster.first, asks)
    one_by_one(cluster.second, [*asks, *users("nowhere")])
    cluster.new_owner()
    until_hits_return(cluster.first, "new-owner")


def test_layerwise_with_mooncake() -> None:
    with Master() as master, owner(master, 256 * MIB), pool_engine(options(master, use_layerwise=True)) as engine:
        asks = users("layers", 4)
        save_and_leave_hbm(engine, asks)
        loads = metric("userkv_swapin_successes_total")
        assert [assert_same(engine, [ask])[0].cached for ask in asks] == lengths(asks)
        wait_for(lambda: metric("userkv_swapin_successes_total") == loads + len(asks), engine)
