"""The contract of pool backends (store/backend.py), over every backend."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.backends import BACKENDS, BUDGET, SLOW, Memory, filled, read
from tests.support.crowd import Crowd
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolFullError,
    PoolUnavailableError,
    Region,
)

PATIENCE = 15.0
"""Seconds after which what a backend may do later (remove what is leased, evict) must be done."""


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.e2e] * (name in SLOW)) for name in BACKENDS])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PoolBackend]:
    with BACKENDS[request.param](tmp_path) as backend:
        yield backend


def eventually(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def put(backend: PoolBackend, user: str, key: str, nbytes: int, seed: int = 0) -> Memory:
    memory = filled(nbytes, seed)
    backend.put(user, key, memory.parts)
    return memory


def within_budgets(backend: PoolBackend) -> bool:
    return all(not tier.budget or tier.used <= tier.budget for tier in backend.usage())


def test_requests_may_be_told_of_at_any_time_and_change_nothing(backend: PoolBackend) -> None:
    backend.count_request("u")
    memory = put(backend, "u", "k", 5000)
    for user in ("u", "nobody"):
        backend.count_request(user)
    assert backend.locate("u", ["k"]) != [None]
    assert read(backend, "u", "k", 5000) == memory.data


@pytest.mark.parametrize("nbytes", [1, 4096, 100_003, 1_500_000])
def test_what_was_put_comes_back(backend: PoolBackend, nbytes: int) -> None:
    memory = put(backend, "u", "k", nbytes)
    for seed in range(3):
        assert read(backend, "u", "k", nbytes, seed) == memory.data
    assert within_budgets(backend)


def test_names_of_any_kind(backend: PoolBackend) -> None:
    names = ["../../etc/passwd", "/", "a b\n*", "ü€😀", "x" * 1500, "%2F", "A", "a"]
    contents = [put(backend, name, f"{name}@extent", 1000, seed).data for seed, name in enumerate(names)]
    assert [read(backend, name, f"{name}@extent", 1000) for name in names] == contents


def test_bytes_that_nobody_wants_go_to_the_same_place(backend: PoolBackend) -> None:
    piece = 50_000
    source = put(backend, "u", "k", 8 * piece)
    scratch = Memory(piece, sizes=[piece])
    wanted = Memory(3 * piece, sizes=[piece] * 3)
    unwanted = scratch.parts[0]
    first, second, third = wanted.parts
    backend.get("u", "k", [unwanted, unwanted, first, unwanted, second, unwanted, unwanted, third])
    assert wanted.data == b"".join(source.data[i * piece : (i + 1) * piece] for i in (2, 4, 7))
    half = Region(unwanted.address + piece // 2, piece // 2)
    backend.get("u", "k", [unwanted, half, half, first, unwanted, second, unwanted, unwanted, third])


@pytest.mark.parametrize("nbytes", [999, 1001, 0, 50_000])
def test_another_size_is_another_object(backend: PoolBackend, nbytes: int) -> None:
    put(backend, "u", "k", 1000)
    with pytest.raises(ObjectCorruptError):
        read(backend, "u", "k", nbytes)
    with pytest.raises((ObjectCorruptError, ObjectMissingError)):
        read(backend, "u", "k", nbytes)


def test_what_was_never_put_is_missing(backend: PoolBackend) -> None:
    put(backend, "u", "k", 10)
    with pytest.raises(ObjectMissingError):
        read(backend, "u", "other", 10)
    with pytest.raises(ObjectMissingError):
        read(backend, "nobody", "nothing", 10)
    assert backend.get_record("u", "record") is None
    assert backend.get_record("nobody", "record") is None
    assert backend.locate("nobody", ["nothing", "at all"]) == [None, None]
    assert backend.locate("u", []) == []
    assert backend.remove("u", ["other"]) == []
    assert backend.remove("nobody", ["nothing"]) == []
    assert backend.remove("u", []) == []


def test_locate_tells_each_key(backend: PoolBackend) -> None:
    for number in range(5):
        put(backend, "u", f"k{number}", 3000, number)
    located = backend.locate("u", ["k0", "none", "k4", "k2", "k2"])
    assert [tier is not None for tier in located] == [True, False, True, True, True]


def test_what_is_removed_is_gone(backend: PoolBackend) -> None:
    keys = [f"k{number}" for number in range(4)]
    for number, key in enumerate(keys):
        put(backend, "u", key, 5000, number)
    backend.put_record("u", "record", b"r" * 1024)
    gone = [*keys[:2], "never there", "record"]
    assert eventually(lambda: backend.remove("u", gone) == [])
    assert [tier is not None for tier in backend.locate("u", keys)] == [False, False, True, True]
    assert backend.get_record("u", "record") is None
    with pytest.raises(ObjectMissingError):
        read(backend, "u", "k0", 5000)
    assert read(backend, "u", "k2", 5000) == filled(5000, 2).data


def test_a_record_is_replaced(backend: PoolBackend) -> None:
    for number in range(20):
        data = bytes([number]) * (1024 if number % 5 else 4096)
        backend.put_record("u", "record", data)
        assert backend.get_record("u", "record") == data
    assert within_budgets(backend)


def test_a_user_goes_whole(backend: PoolBackend) -> None:
    extents, nbytes = 3, 150_000
    users = [f"user {number}" for number in range(4 * BUDGET // (extents * nbytes))]
    keys = [f"k{extent}" for extent in range(extents)]
    for number, user in enumerate(users):
        for extent, key in enumerate(keys):
            put(backend, user, f"{user}@{key}", nbytes, 100 * number + extent)
        backend.put_record(user, f"{user}@record", user.encode() + bytes(1000))
        assert within_budgets(backend)

    def whole() -> bool:
        return all(len({*kept(user)}) == 1 for user in users)

    def kept(user: str) -> list[bool]:
        located = backend.locate(user, [f"{user}@{key}" for key in keys])
        return [tier is not None for tier in located] + [backend.get_record(user, f"{user}@record") is not None]

    assert eventually(whole)
    assert all(kept(users[-1]))
    assert not any(kept(users[0]))
    for number in reversed(range(len(users))):
        for extent, key in enumerate(keys):
            try:
                found = read(backend, users[number], f"{users[number]}@{key}", nbytes)
            except ObjectMissingError:  # Reading others may have moved them to a faster tier, and this one out.
                assert number < len(users) - 1
                continue
            assert found == filled(nbytes, 100 * number + extent).data


def test_what_can_never_fit_is_refused(backend: PoolBackend) -> None:
    put(backend, "other", "other@k", 1000)
    with pytest.raises(PoolFullError):
        put(backend, "u", "u@k", 3 * BUDGET)
    assert backend.locate("u", ["u@k"]) == [None]
    assert read(backend, "other", "other@k", 1000) == filled(1000).data


def test_after_close_everything_is_refused(backend: PoolBackend) -> None:
    put(backend, "u", "k", 1000)
    memory = Memory(1000)
    backend.close()
    backend.close()
    calls: list[Callable[[], object]] = [
        lambda: backend.put("u", "k2", memory.parts),
        lambda: backend.get("u", "k", memory.parts),
        lambda: backend.locate("u", ["k"]),
        lambda: backend.put_record("u", "r", b"r"),
        lambda: backend.get_record("u", "r"),
        lambda: backend.remove("u", ["k"]),
        backend.usage,
    ]
    for call in calls:
        with pytest.raises(PoolUnavailableError):
            call()


def test_threads_get_what_was_put_or_nothing(backend: PoolBackend) -> None:
    crowd = Crowd(backend, 4)
    for _ in range(20):
        time.sleep(0.1)
        assert within_budgets(backend)
    crowd.join()
    assert crowd.wrong == []
    assert crowd.read > 20


def test_close_while_threads_are_busy(backend: PoolBackend) -> None:
    crowd = Crowd(backend, 3)
    time.sleep(0.3)
    backend.close()
    crowd.join()
    assert crowd.wrong == []
