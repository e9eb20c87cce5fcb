"""What the embedded backend does beyond the contract: tiers, restarts, one owner per directory."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.backends import Memory, filled, read
from tests.support.crowd import Crowd
from tests.support.local import PAGE, contents, files_of, open_local, put, settle
from userkv.cache.policies import ADAPTIVE, LRU
from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import MIB
from userkv.store.backend import ObjectMissingError, PoolFullError, Tier
from userkv.store.local import LocalBackend, check_directory, index, tiers
from userkv.store.local.index import Entry
from userkv.store.local.ssd_files import USER_BYTES, file_cost
from userkv.store.local.writer import Writer


def test_what_is_put_is_in_memory_at_once_and_on_the_ssd_soon(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        assert put(backend, "u", "k", 100_000) is Tier.DRAM
        settle(backend)
        dram, ssd = backend.usage()
        assert dram.used == -(-100_000 // PAGE) * PAGE
        assert ssd.used == file_cost(100_000) + USER_BYTES
        assert len(files_of(tmp_path)) == 1


def test_a_user_who_leaves_memory_is_read_from_the_ssd_and_comes_back_whole(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        for user in "abc":
            for key in "12":
                put(backend, user, user + key, 200_000)
            backend.put_record(user, user + "record", b"r" * 1024)
        assert backend.locate("a", ["a1", "a2", "arecord"]) == [Tier.SSD] * 3
        memory = Memory(200_000)
        assert backend.get("a", "a1", memory.parts) is Tier.SSD
        assert memory.data == contents(200_000)
        settle(backend)
        assert backend.locate("a", ["a1", "a2", "arecord"]) == [Tier.DRAM] * 3
        assert backend.get("a", "a2", memory.parts) is Tier.DRAM
        assert backend.locate("b", ["b1", "b2", "brecord"]) == [Tier.SSD] * 3
        assert backend.counters()["promotions"] == 3
        assert backend.counters()["dram_evictions"] == 2


def test_without_a_directory_users_are_evicted_for_good(tmp_path: Path) -> None:
    with open_local(MIB) as backend:
        for user in "abc":
            put(backend, user, user, 400_000)
        assert backend.locate("a", ["a"]) + backend.locate("c", ["c"]) == [None, Tier.DRAM]
        assert [usage.tier for usage in backend.usage()] == [Tier.DRAM]


def test_nobody_evicts_himself_nor_others_in_vain() -> None:
    with open_local(MIB) as backend:
        put(backend, "other", "k", 100_000)
        put(backend, "u", "1", 600_000)
        with pytest.raises(PoolFullError, match="local_dram_bytes"):
            put(backend, "u", "2", 600_000)
        assert backend.locate("other", ["k"]) + backend.locate("u", ["1"]) == [Tier.DRAM] * 2


def test_what_is_too_big_for_memory_goes_to_the_ssd(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        assert put(backend, "u", "1", 600_000) is Tier.DRAM
        assert put(backend, "u", "2", 600_000) is Tier.SSD
        assert put(backend, "u", "3", 3 * MIB) is Tier.SSD
        assert read(backend, "u", "3", 3 * MIB) == contents(3 * MIB)
        settle(backend)
        assert backend.locate("u", ["1", "2", "3"]) == [Tier.DRAM, Tier.SSD, Tier.SSD]


def test_what_was_put_last_survives_a_restart(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        for user in "abcdef":
            put(backend, user, user, 400_000)
            backend.put_record(user, "record", user.encode())
    assert backend.counters()["unwritten_bytes"] == 0
    with open_local(MIB, tmp_path) as backend:
        for user in "abcdef":
            assert backend.get_record(user, "record") == user.encode()
            assert read(backend, user, user, 400_000) == contents(400_000)
        assert backend.counters()["users"] == 6


def test_a_restart_keeps_the_order_of_use_and_the_budget(tmp_path: Path) -> None:
    with open_local(2 * MIB, tmp_path) as backend:
        for user in "abcd":
            put(backend, user, user, 400_000)
        settle(backend)
        read(backend, "b", "b", 400_000)
        backend.locate("a", ["a"])
    with open_local(2 * MIB, tmp_path, ssd_bytes=900_000) as backend:
        here = [user for user in "abcd" if backend.locate(user, [user]) != [None]]
        assert here == ["a", "b"]
        assert backend.counters()["ssd_evictions"] == 2
        assert len(files_of(tmp_path)) == 2


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was just used is spared no more than others."""
    monkeypatch.setattr(index, "GRACE_SECONDS", 0.0)


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize(
    ("dram", "ssd"), [pytest.param(400_000, 0, id="DRAM"), pytest.param(0, 420_000, id="SSD"), (200_000, 420_000)]
)
def test_who_is_asked_for_often_stays_where_the_policy_counts(dram: int, ssd: int, tmp_path: Path) -> None:
    """Room for four: one user comes every sixth time, all others once. LRU loses him each time."""
    hits = {}
    for policy in (LRU, ADAPTIVE):
        directory = tmp_path / policy
        directory.mkdir()
        with open_local(dram, directory if ssd else None, ssd, policy=policy) as backend:
            found = []
            for number in range(400):
                user = f"other {number}" if number % 6 else "regular"
                backend.count_request(user)
                found += [backend.locate(user, [user]) != [None]] if number % 6 == 0 else []
                if backend.locate(user, [user]) == [None]:
                    put(backend, user, user, 90_000)
            hits[policy] = sum(found[20:]) / len(found[20:])
            settle(backend)
            backend._index.check_integrity()
    assert hits[LRU] == 0
    assert hits[ADAPTIVE] > 0.9


@pytest.mark.usefixtures("no_grace")
def test_a_restart_keeps_the_order_of_use_where_the_policy_counts(tmp_path: Path) -> None:
    with open_local(2 * MIB, tmp_path, policy=ADAPTIVE) as backend:
        for user in "abcd":
            put(backend, user, user, 400_000)
        settle(backend)
        for user in "ccdbacb":
            backend.count_request(user)
            backend.locate(user, [user])
    with open_local(2 * MIB, tmp_path, ssd_bytes=900_000, policy=ADAPTIVE) as backend:
        assert [user for user in "abcd" if backend.locate(user, [user]) != [None]] == ["b", "c"]


@pytest.mark.parametrize("with_files", [False, True])
def test_a_new_user_stays_until_what_is_found_of_him_is_read(with_files: bool, tmp_path: Path) -> None:
    """All others have come more often; but between one of his objects and the next, others go."""
    with open_local(*((0, tmp_path, 420_000) if with_files else (400_000,)), policy=ADAPTIVE) as backend:
        for user in "abcd" * 3:
            backend.count_request(user)
        for user in "abcd":
            put(backend, user, user, 90_000)
        for number in "123":
            for user in ("new", "other"):
                put(backend, user, user + number, 40_000)
        for user in ("new", "other"):
            assert None not in backend.locate(user, [user + number for number in "123"])


def test_a_wish_of_a_user_who_was_evicted_leaves_the_next_one_of_that_name_alone() -> None:
    """The writer keeps users whom nobody holds; by their turn, they may be gone and others have their names."""
    with open_local(MIB) as backend:
        books = backend._index
        with books.changed:
            gone = books.hold_name(b"u")
            books.release(gone)
            there = books.hold_name(b"u")
            block = books.allocate(there, 1000)
            there.entries[b"k"] = Entry(b"k", 1000, block=block)
            books.release(there)
            books.hold(gone)
            books.release(gone)
            assert books.dram_victim() is there
            books.check_integrity()


def test_a_start_removes_what_a_crash_has_left_and_nothing_else(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        put(backend, "u", "k", 1000)
    file = files_of(tmp_path)[0]
    (tmp_path / "notes.txt").write_text("mine")
    (file.parent / "notes.txt").write_text("mine")
    file.with_name(file.name + ".tmp").write_bytes(b"half")
    file.with_name("0" * 32).write_bytes(b"torn")
    (tmp_path / "users" / ("1" * 32)).mkdir()
    (tmp_path / "users" / "others").mkdir()
    with open_local(MIB, tmp_path) as backend:
        assert backend.counters()["users"] == 1
        assert read(backend, "u", "k", 1000) == contents(1000)
    assert sorted(path.name for path in file.parent.iterdir()) == sorted([file.name, "notes.txt"])
    assert sorted(path.name for path in (tmp_path / "users").iterdir()) == sorted([file.parent.name, "others"])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_memory_that_is_being_read_stays_until_the_last_reader_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    scatter = tiers.scatter

    def slow_scatter(*args: object) -> int:
        reading.set()
        assert go_on.wait(10)
        return scatter(*args)  # type: ignore[arg-type]

    with open_local(MIB) as backend:
        put(backend, "u", "k", 400_000)
        monkeypatch.setattr(tiers, "scatter", slow_scatter)
        memory = Memory(400_000)
        reader = threading.Thread(target=backend.get, args=("u", "k", memory.parts))
        reader.start()
        assert reading.wait(10)
        assert backend.remove("u", ["k"]) == []
        assert backend.locate("u", ["k"]) == [None]
        used = backend.usage()[0].used
        assert used >= 400_000
        for number in range(5):
            put(backend, f"other {number}", "k", 400_000, seed=1 + number)
        go_on.set()
        reader.join()
        assert memory.data == contents(400_000)
        backend._index.check_integrity()


def test_room_that_is_in_use_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scatter = tiers.scatter
    reading = threading.Event()

    def slow_scatter(*args: object) -> int:
        reading.set()
        time.sleep(0.1)
        return scatter(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(tiers, "scatter", slow_scatter)
    with open_local(MIB) as backend:
        put(backend, "u", "k", 700_000)
        memory = Memory(700_000)
        reader = threading.Thread(target=backend.get, args=("u", "k", memory.parts))
        reader.start()
        assert reading.wait(10)
        put(backend, "other", "k", 700_000)
        reader.join()
        assert memory.data == contents(700_000)


def test_two_who_wait_for_each_other_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "PATIENCE", 60.0)
    together = threading.Barrier(2)
    memory = filled(500_000)
    refused = []

    def put_more(user: str) -> None:
        with backend._operation(user) as held:
            together.wait(10)
            try:
                backend._tiers.put(held, b"another", memory.parts)
            except PoolFullError:
                refused.append(user)

    with open_local(MIB) as backend:
        put(backend, "a", "1", 500_000)
        put(backend, "b", "1", 500_000)
        threads = [threading.Thread(target=put_more, args=(user,)) for user in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(refused) == 1


def test_a_replaced_record_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is only in memory yet; a crash now must not bring back what a tombstone has replaced."""
    with open_local(MIB, tmp_path) as backend:
        backend.put_record("u", "record", b"old")
        settle(backend)
        assert len(files_of(tmp_path)) == 1
        monkeypatch.setattr(Writer, "_write", lambda self, user: None)
        backend.put_record("u", "record", b"new")
        assert files_of(tmp_path) == []
        assert backend.get_record("u", "record") == b"new"


def test_who_puts_faster_than_the_ssd_writes_himself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = threading.Event()
    write = Writer._write

    def slow_write(self: Writer, user: object) -> None:
        if threading.current_thread().name == "userkv-local-writer":
            assert slow.wait(10)
        write(self, user)  # type: ignore[arg-type]

    monkeypatch.setattr(Writer, "_write", slow_write)
    with open_local(4 * MIB, tmp_path) as backend:
        for number in range(30):
            put(backend, f"u{number}", "k", 100_000)
            assert backend.counters()["unwritten_bytes"] <= MIB + 100_000
        slow.set()


@pytest.mark.parametrize("policy", [LRU, ADAPTIVE])
def test_threads_leave_the_books_in_order(policy: str, tmp_path: Path) -> None:
    with open_local(2 * MIB, tmp_path, ssd_bytes=4 * MIB, policy=policy) as backend:
        crowd = Crowd(backend, 4)
        time.sleep(1.5)
        crowd.join()
        settle(backend)
        assert crowd.wrong == []
        backend._index.check_integrity()


def test_one_directory_has_one_owner(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from userkv.store.local import LocalBackend
backend = LocalBackend(0, Path({str(tmp_path)!r}), 1 << 20)
print("open", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(InvalidSettingError, match="in use by another engine: give each engine its own"):
            LocalBackend(0, tmp_path, MIB)
        with pytest.raises(InvalidSettingError, match="in use"):
            check_directory(tmp_path)
        owner.kill()
    check_directory(tmp_path)
    with open_local(0, tmp_path), pytest.raises(InvalidSettingError, match="in use"):
        check_directory(tmp_path)
    check_directory(tmp_path)


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_directory(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidSettingError, match="cannot be used"):
            check_directory(path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InvalidSettingError, match="cannot be written to"):
        LocalBackend(0, tmp_path, MIB)


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises(InvalidSettingError, match="local_dram_bytes"):
        LocalBackend(1 << 60, None, 0)
    with pytest.raises(InvalidSettingError, match="set at least"):
        LocalBackend(1000, None, 0)


def test_an_empty_object_is_an_object(tmp_path: Path) -> None:
    with open_local(MIB, tmp_path) as backend:
        backend.put("u", "k", filled(0).parts)
        backend.get("u", "k", [])
        settle(backend)
    with open_local(MIB, tmp_path) as backend:
        assert backend.get("u", "k", []) is Tier.SSD
        with pytest.raises(ObjectMissingError):
            backend.get("u", "other", [])
