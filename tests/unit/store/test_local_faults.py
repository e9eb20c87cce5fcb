"""The embedded backend when the device fails or is full, and when much happens at once."""

import errno
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.backends import read
from tests.support.local import contents, disk_usage, files_of, open_local, put, settle
from userkv.core.sizes import MIB
from userkv.store.backend import (
    ObjectCorruptError,
    ObjectMissingError,
    PoolFullError,
    PoolUnavailableError,
    Region,
    Tier,
)
from userkv.store.local.index import User
from userkv.store.local.ssd_files import SsdFiles
from userkv.store.local.ssd_tier import SsdTier
from userkv.store.local.writer import Writer
from userkv.store.regions import total_bytes

SIZE = 700_000


def failing(number: int) -> Callable[..., int]:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("call", ["pwritev", "rename", "open", "mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE])
def test_memory_goes_on_when_the_ssd_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    with open_local(MIB, tmp_path) as backend:
        put(backend, "before", "k", 1000)
        settle(backend)
        with monkeypatch.context() as broken:
            broken.setattr(os, call, failing(number))
            for user in "abcd":
                assert put(backend, user, user, 400_000) is Tier.DRAM
                assert read(backend, user, user, 400_000) == contents(400_000)
            settle(backend)
            assert backend.locate("a", ["a"]) == [None]
            assert backend.counters()["ssd_write_errors"] >= 4
        put(backend, "d", "another", 1000)
        settle(backend)
    with open_local(MIB, tmp_path) as backend:
        assert backend.locate("d", ["d", "another"]) == [Tier.SSD] * 2
        assert disk_usage(tmp_path) <= backend.usage()[1].used
        backend._index.check_integrity()
    assert not list(tmp_path.rglob("*.tmp"))


def test_without_memory_the_caller_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(0, tmp_path) as backend:
        backend.put_record("u", "record", b"old")
        for number, error in ((errno.EIO, PoolUnavailableError), (errno.ENOSPC, PoolFullError)):
            with monkeypatch.context() as broken:
                broken.setattr(os, "pwritev", failing(number))
                with pytest.raises(error, match="local_dir"):
                    put(backend, "u", "k", SIZE)
                with pytest.raises(error, match="local_dir"):
                    backend.put_record("u", "record", b"new")
            assert backend.get_record("u", "record") == b"old"
            assert backend.locate("u", ["k"]) == [None]
            backend._index.check_integrity()


def test_a_device_that_others_have_filled_is_used_as_far_as_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev = os.pwritev

    def limited(*args: object) -> int:
        if disk_usage(tmp_path) > 3 * MIB:
            raise OSError(errno.ENOSPC, "full")
        return pwritev(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", limited)
    with open_local(0, tmp_path) as backend:
        for number in range(20):
            put(backend, f"u{number}", "k", SIZE)
            assert read(backend, f"u{number}", "k", SIZE) == contents(SIZE)
        assert backend.counters()["ssd_evictions"] >= 15
        backend._index.check_integrity()


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_local(2 * MIB, tmp_path) as backend:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        try:
            put(backend, "u", "k", SIZE)
            put(backend, "u2", "k", 1000)
            settle(backend)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(files_of(tmp_path)) == 1
        assert read(backend, "u", "k", SIZE) == contents(SIZE)


def test_calls_that_do_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: pwritev(fd, [memoryview(buffers[0])[:9999]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [memoryview(buffers[0])[:7777]], offset))
    with open_local(0, tmp_path) as backend:
        put(backend, "u", "k", SIZE)
        assert read(backend, "u", "k", SIZE) == contents(SIZE)


def test_a_file_that_cannot_be_read_now_may_be_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(0, tmp_path) as backend:
        put(backend, "u", "k", SIZE)
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", failing(errno.EIO))
            with pytest.raises(PoolUnavailableError, match="local_dir"):
                read(backend, "u", "k", SIZE)
        assert read(backend, "u", "k", SIZE) == contents(SIZE)
        assert backend.counters()["ssd_read_errors"] == 1


def test_what_cannot_be_removed_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(MIB, tmp_path) as backend:
        put(backend, "u", "k", SIZE)
        backend.put_record("u", "record", b"old")
        settle(backend)
        with monkeypatch.context() as broken:
            broken.setattr(os, "unlink", failing(errno.EPERM))
            assert backend.remove("u", ["k"]) == ["k"]
            with pytest.raises(PoolUnavailableError):
                backend.put_record("u", "record", b"new")
        assert backend.get_record("u", "record") == b"old"
        assert read(backend, "u", "k", SIZE) == contents(SIZE)
        settle(backend)
        backend._index.check_integrity()
        assert backend.remove("u", ["k", "record"]) == []
        assert backend.counters()["users"] == 0


def test_the_directory_is_removed(tmp_path: Path) -> None:
    directory = tmp_path / "pool"
    with open_local(MIB, directory) as backend:
        put(backend, "gone", "k", SIZE)
        put(backend, "u", "k", SIZE)
        settle(backend)
        shutil.rmtree(directory)
        with pytest.raises(ObjectMissingError):
            read(backend, "gone", "k", SIZE)
        assert read(backend, "u", "k", SIZE) == contents(SIZE)
        put(backend, "v", "k", SIZE)
        assert read(backend, "v", "k", SIZE) == contents(SIZE)
        settle(backend)
        assert backend.usage()[1].used <= 2 * SIZE
        backend._index.check_integrity()


def test_a_record_is_written_after_its_extents_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    write = SsdFiles.write

    def recorded(self: SsdFiles, user: bytes, name: bytes, parts: Sequence[Region], checksum: int | None = None) -> int:
        written.append(total_bytes(parts))
        if broken and total_bytes(parts) == SIZE:
            raise OSError(errno.EIO, "broken")
        return write(self, user, name, parts, checksum)

    monkeypatch.setattr(SsdFiles, "write", recorded)
    monkeypatch.setattr(Writer, "_write", lambda self, user: None)
    for broken in (True, False):
        with open_local(8 * MIB, tmp_path) as backend:
            put(backend, "u", "1", 1000)
            backend.put_record("u", "record", b"r" * 64)
            put(backend, "u", "2", SIZE)
            put(backend, "u", "3", 2000)
            backend.put_record("u", "record", b"r" * 100)
        assert written == [1000, SIZE, *([] if broken else [2000, 100])]
        written.clear()


def test_a_user_of_whom_a_part_cannot_be_written_goes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(MIB, tmp_path) as backend:
        put(backend, "u", "1", 100_000)
        settle(backend)
        monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
        put(backend, "u", "2", 100_000)
        put(backend, "other", "k", 900_000)
        assert backend.locate("u", ["1", "2"]) == [None, None]
        assert files_of(tmp_path) == []
        settle(backend)
        backend._index.check_integrity()


def test_what_is_put_while_its_user_is_being_evicted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = SsdTier.flush
    with open_local(MIB, tmp_path) as backend:
        put(backend, "u", "1", 100_000)
        settle(backend)

        def flush_then_put(self: SsdTier, user: User) -> bool:
            monkeypatch.setattr(SsdTier, "flush", flush)
            done = flush(self, user)
            put(backend, "u", "2", 1000)
            return done

        monkeypatch.setattr(Writer, "_write", lambda self, user: None)
        monkeypatch.setattr(SsdTier, "flush", flush_then_put)
        put(backend, "other", "k", 950_000)
        put(backend, "another", "k", 500_000)
        assert None not in backend.locate("u", ["1", "2"])


def test_a_record_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_local(0, tmp_path) as backend:
        backend.put_record("u", "record", b"old")

        def replace_then_raise(error: Exception) -> Callable[..., int]:
            def replaced(*args: object) -> int:
                monkeypatch.undo()
                backend.put_record("u", "record", b"the new one")
                raise error

            return replaced

        for error in (FileNotFoundError(), ObjectCorruptError("size")):
            monkeypatch.setattr(SsdFiles, "read", replace_then_raise(error))
            assert backend.get_record("u", "record") == b"the new one"
        assert backend.counters()["corrupt_objects"] == 0


def test_a_record_goes_before_its_extents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    removed: list[bytes] = []
    write, remove = SsdFiles.write, SsdFiles.remove
    monkeypatch.setattr(SsdFiles, "write", lambda self, *args: written.append(args[1]) or write(self, *args))
    monkeypatch.setattr(SsdFiles, "remove", lambda self, *args: removed.append(args[1]) or remove(self, *args))
    with open_local(0, tmp_path, ssd_bytes=2 * SIZE) as backend:
        put(backend, "u", "1", SIZE // 2)
        put(backend, "u", "2", SIZE // 2)
        backend.put_record("u", "record", b"r" * 100)
        put(backend, "other", "k", SIZE)
        assert removed == written[2::-1]


def test_a_scan_finds_objects_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    files = SsdFiles(tmp_path)
    names = [bytes([37 * number % 256]) * 16 for number in range(30)]
    for name in names:
        files.write(b"u" * 16, name, [])
    (user,) = files.scan()
    assert user.objects == [(name, 0) for name in names]
