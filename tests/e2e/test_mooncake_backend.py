"""The Mooncake backend when something goes wrong, against real servers: every call returns in time, and it recovers."""

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.backends import Memory, closing, filled, read
from tests.support.mooncake import Master, client_server, clients, owner, wait_for
from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import MIB
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolBackend,
    PoolFullError,
    PoolUnavailableError,
    Region,
    StoreError,
    Tier,
)
from userkv.store.mooncake import objects
from userkv.store.mooncake.backend import MooncakeBackend
from userkv.store.mooncake.recent import Place

pytestmark = pytest.mark.e2e
SLACK = 0.7
"""Seconds that a busy machine may add."""


def put(backend: PoolBackend, key: str, nbytes: int = 100_000, user: str = "u") -> bytes:
    memory = filled(nbytes)
    backend.put(user, key, memory.parts)
    return memory.data


def works(backend: PoolBackend) -> bool:
    key = f"probe@{time.monotonic_ns()}"
    try:
        return put(backend, key) == read(backend, "u", key, 100_000)
    except StoreError:
        return False


def calls(backend: PoolBackend) -> dict[str, Callable[[], object]]:
    source, target = filled(1000), Memory(1000)
    return {
        "put": lambda: backend.put("u", f"new@{time.monotonic_ns()}", source.parts),
        "get": lambda: backend.get("u", "k", target.parts),
        "locate": lambda: backend.locate("u", ["k"]),
        "put_record": lambda: backend.put_record("u", "r", b"r" * 1024),
        "get_record": lambda: backend.get_record("u", "r"),
        "remove": lambda: backend.remove("u", ["k"]),
    }


def assert_unavailable(backend: PoolBackend, seconds: dict[str, float], default: float = 1.0) -> None:
    for name, call in calls(backend).items():
        start = time.monotonic()
        with pytest.raises(PoolUnavailableError):
            call()
        assert time.monotonic() - start < seconds.get(name, default) + SLACK, name


def test_master_is_killed_and_comes_back() -> None:
    with Master() as master, closing(master.open()) as backend, closing(master.open(0)) as reader:
        data = put(backend, "k", 1000)
        for one in (backend, reader):
            assert one.locate("u", ["k"]) == [Tier.DRAM]
        master.kill()
        # What was located a moment ago is read without the master if it lies in own memory; else Mooncake asks again.
        assert read(backend, "u", "k", 1000) == data
        start = time.monotonic()
        with pytest.raises(PoolUnavailableError):
            read(reader, "u", "k", 1000)
        assert time.monotonic() - start < 3 + SLACK
        assert backend.locate("u", []) == []
        with pytest.raises(PoolUnavailableError):
            backend.locate("u", ["k"])
        for one in (backend, reader):
            assert_unavailable(one, {"put": 3.0})
        master.start()
        wait_for(lambda: works(backend) and works(reader))
        with pytest.raises(ObjectMissingError):
            read(backend, "u", "k", 1000)


def test_own_memory_that_holds_something_else_by_now_is_not_believed() -> None:
    with Master() as master, closing(master.open()) as backend:
        assert backend._connection._client is not None
        assert backend._connection._client.own_memory is not None
        data = put(backend, "k")
        assert backend.locate("u", ["k"]) == [Tier.DRAM]
        place = backend._recent.find("k")
        assert place is not None
        assert place.region is not None
        ctypes.memset(place.region.address + 5000, 0, 64)
        with pytest.raises(ObjectCorruptError):
            read(backend, "u", "k", 100_000)
        put(backend, "other")
        backend._recent.note(["other"], [Place(Tier.DRAM, place.region)])  # As if it had moved since.
        assert read(backend, "u", "other", 100_000) == data


def test_stuck_calls_neither_pile_up_nor_block_for_ever() -> None:
    with Master() as master, closing(master.open()) as backend:
        put(backend, "k", 1000)
        before = threading.active_count()
        master.kill()
        ended: list[float] = []

        def locate() -> None:
            start = time.monotonic()
            with suppress(PoolUnavailableError):
                backend.locate("u", ["k"])
            ended.append(time.monotonic() - start)

        threads = [threading.Thread(target=locate) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 40
        assert max(ended) < 2 + SLACK
        assert threading.active_count() <= before + 8
        master.start()
        wait_for(lambda: works(backend))


def test_master_freezes_and_goes_on() -> None:
    with Master() as master, closing(master.open()) as backend:
        data = put(backend, "k")
        master.freeze()
        assert_unavailable(backend, {})
        master.thaw()
        wait_for(lambda: works(backend))
        assert read(backend, "u", "k", len(data)) == data


def test_there_is_no_master_yet() -> None:
    master = Master()
    master.kill()
    with closing(master.open()) as backend:
        memory = filled(1000)
        backend.register(memory.parts)
        backend.register(memory.parts)
        assert_unavailable(backend, {}, 0.5)
        master.start()
        with master:
            wait_for(lambda: works(backend))


def test_memory_is_registered_again() -> None:
    with Master() as master, closing(master.open()) as backend:
        memory = Memory(300_000, sizes=[100_000] * 3)
        (address, nbytes), *_ = sorted(memory.parts)
        for start, end in ((0, nbytes), (0, nbytes), (100, 200), (0, nbytes + 64), (64, nbytes + 128), (0, 2 * nbytes)):
            backend.register([Region(address + start, end - start)])
        data = put(backend, "k", 300_000)
        backend.get("u", "k", memory.parts)
        assert memory.data == data


def test_owner_of_the_memory_is_killed() -> None:
    with Master() as master, owner(master, 32 * MIB) as first, closing(master.open(0)) as backend:
        put(backend, "k")
        first.kill()
        start = time.monotonic()
        with pytest.raises(PoolUnavailableError):
            read(backend, "u", "k", 100_000)
        assert time.monotonic() - start < 2 + SLACK
        wait_for(lambda: backend.locate("u", ["k"]) == [None])
        with owner(master, 32 * MIB):
            wait_for(lambda: works(backend))


def test_owner_of_the_memory_freezes_in_the_middle() -> None:
    with Master() as master, owner(master, 64 * MIB) as lender, closing(master.open(0)) as backend:
        put(backend, "k", 16 * MIB)
        lender.freeze()
        target = Memory(16 * MIB, sizes=[16 * MIB])
        start = time.monotonic()
        with pytest.raises(PoolUnavailableError):
            backend.get("u", "k", target.parts)
        assert time.monotonic() - start < 5 + SLACK
        address, nbytes = target.parts[0]
        ctypes.memset(address, 7, nbytes)
        lender.thaw()
        time.sleep(0.5)
        assert target.data == b"\7" * nbytes, "bytes arrived after get() had given up"
        wait_for(lambda: works(backend))


def test_nothing_is_served_that_is_not_what_was_put() -> None:
    with Master() as master, closing(master.open()) as backend:
        with backend._connection.use() as client:
            kept = objects.placement("u", 1)
            put(backend, "other", 5000)
            store = client.store
            whole = store.get("other")
            assert len(whole) == 64 + 5000
            assert store.put("k1", whole, kept) == 0  # Another key's object.
            put(backend, "k2", 5000)
            assert store.upsert("k2", store.get("k2")[:-1] + b"\0", kept) == 0  # One byte is wrong.
            assert store.put("k3", b"x" * 5064, kept) == 0  # No header.
        for key in ("k1", "k2", "k3"):
            with pytest.raises(ObjectCorruptError):
                read(backend, "u", key, 5000)
            assert backend.locate("u", [key]) == [None]
        assert backend.counters()["corrupt_objects"] == 3
        assert read(backend, "u", "other", 5000) == filled(5000).data


def test_what_is_leased_is_reported_and_goes_later() -> None:
    with Master(lease_ms=1000) as master, closing(master.open()) as backend:
        put(backend, "k")
        backend.put_record("u", "r", b"r" * 1024)
        assert backend.locate("u", ["k", "r"]) == [Tier.DRAM, Tier.DRAM]
        assert backend.remove("u", ["k", "gone", "r"]) == ["k", "r"]
        wait_for(lambda: backend.remove("u", ["k", "gone", "r"]) == [])


def test_large_records_and_long_names() -> None:
    with Master() as master, closing(master.open()) as backend:
        for nbytes in (1024, 1 << 16, 1 << 20, 1024):
            data = filled(nbytes).data
            backend.put_record("u", "r", data)
            assert backend.get_record("u", "r") == data
        keys = ["x" * 300 + suffix for suffix in ("", "y", "z")]
        for key in keys:
            backend.put_record("u", key, key[-1:].encode() * 1024)
        assert [backend.get_record("u", key) for key in keys] == [c * 1024 for c in (b"x", b"y", b"z")]


def test_a_record_that_is_replaced_all_the_time_is_whole_or_torn_but_there() -> None:
    with Master() as master, closing(master.open()) as backend, closing(master.open(0)) as reader:
        versions = [bytes([n]) * 4096 for n in range(50)]
        backend.put_record("u", "r", versions[0])
        stop = threading.Event()

        def replace_it() -> None:
            while not stop.is_set():
                for data in versions:
                    backend.put_record("u", "r", data)

        writer = threading.Thread(target=replace_it)
        writer.start()
        try:
            seen = [reader.get_record("u", "r") for _ in range(300)]
        finally:
            stop.set()
            writer.join()
        assert all(data is None or len(data) == 4096 for data in seen)
        assert sum(data is not None for data in seen) > 250


@pytest.mark.parametrize("how", ["freeze", "kill"])
def test_client_process_fails_and_comes_back(how: str) -> None:
    with Master() as master:
        server, address = client_server(master, 64 * MIB)
        config = replace(master.config(0), client_server_address=address)
        with server, closing(MooncakeBackend(config)) as backend:
            put(backend, "k")
            getattr(server, how)()
            assert_unavailable(backend, {"put": 3.0})
            if how == "freeze":
                server.thaw()
            else:
                wait_for(lambda: clients(master) == 0)
                server.start()
            wait_for(lambda: works(backend), 60)


def test_three_times_the_memory_with_files(tmp_path: Path) -> None:
    nbytes, users = MIB, 48
    with Master("--enable_offload=true") as master:
        lender = owner(master, 64 * MIB, tmp_path)
        with lender, closing(master.open(0)) as backend:
            kept: list[int] = []
            for user in range(users):
                memory = filled(nbytes, user)
                for extent in range(4):
                    with suppress(PoolFullError):
                        backend.put(str(user), f"{user}@{extent}", memory.parts)
                        kept.append(user * 4 + extent)
                    time.sleep(0.01)
                backend.put_record(str(user), f"{user}@r", b"old %d" % user + bytes(1000))
                if user >= 8:  # Replaced while it lies in memory, in a file, or in both.
                    backend.put_record(str(user - 8), f"{user - 8}@r", b"new %d" % (user - 8) + bytes(1000))
            assert len(kept) > users * 4 * 0.9

            def check() -> set[Tier | None]:
                tiers = set()
                for number in kept:
                    user, extent = divmod(number, 4)
                    memory = Memory(nbytes)
                    tiers.add(backend.get(str(user), f"{user}@{extent}", memory.parts))
                    assert memory.data == filled(nbytes, user).data
                for user in range(users):
                    word = b"new" if user < users - 8 else b"old"
                    assert backend.get_record(str(user), f"{user}@r") == word + b" %d" % user + bytes(1000)
                return tiers

            assert check() == {Tier.DRAM, Tier.SSD}
            with pytest.raises(InvalidSettingError, match="in use"):
                MooncakeBackend(replace(master.config(), enable_ssd_offload=True, ssd_offload_path=str(tmp_path)))
            time.sleep(2.5)  # Until what came last is in files, too.
            lender.end()
            wait_for(lambda: clients(master) == 1)
            with owner(master, 64 * MIB, tmp_path):
                wait_for(lambda: None not in backend.locate("47", [f"47@{extent}" for extent in range(4)]))
                assert check() == {Tier.SSD}


def test_files_of_an_owner_that_crashed_come_back(tmp_path: Path) -> None:
    with Master("--enable_offload=true") as master:
        lender = owner(master, 64 * MIB, tmp_path)
        with lender, closing(master.open(0)) as backend:
            data = put(backend, "k", MIB)
            wait_for(lambda: any(path.stat().st_size > MIB for path in tmp_path.rglob("*") if path.is_file()))
            time.sleep(1.5)  # Until the master knows.
            lender.kill()
            lender.start()  # At once: the master has not missed it yet, and would drop what it announces now.
            wait_for(lambda: backend.locate("u", ["k"]) == [None])
            wait_for(lambda: backend.locate("u", ["k"]) == [Tier.SSD])
            assert read(backend, "u", "k", MIB) == data
