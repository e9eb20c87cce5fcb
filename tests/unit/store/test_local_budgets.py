"""Budgets and books of the embedded backend, after any sequence of operations."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.backends import read
from tests.support.local import contents, disk_usage, files_of, put, settle
from userkv.cache.policies import POLICIES
from userkv.store.backend import ObjectCorruptError, ObjectMissingError, PoolFullError, Tier
from userkv.store.local import LocalBackend
from userkv.store.local.ssd_files import ENTRY_BYTES

USERS = st.sampled_from(["a", "b", "c", "d"])
SIZES = st.sampled_from([0, 1, 1000, 4096, 9_000, 30_000, 70_000])


class Pool(RuleBasedStateMachine):
    """A small pool, and what was put into it. Whatever is evicted, what comes back is right."""

    @initialize(
        dram=st.sampled_from([0, 16_384, 65_536]),
        ssd=st.sampled_from([0, 50_000, 200_000]),
        policy=st.sampled_from(list(POLICIES)),
    )
    def start(self, dram: int, ssd: int, policy: str) -> None:
        self.policy = policy
        self.directory = Path(tempfile.mkdtemp(prefix="userkv-test-"))
        self.dram = dram or (0 if ssd else 65_536)
        self.ssd = ssd
        self.objects: dict[tuple[str, str], tuple[int, int]] = {}
        self.records: dict[str, set[bytes | None]] = {}
        self.damaged = False
        self.number = 0
        self.open()

    def open(self) -> None:
        directory = self.directory if self.ssd else None
        self.backend = LocalBackend(self.dram, directory, self.ssd, page_bytes=4096, policy=self.policy)

    @rule(user=USERS, nbytes=SIZES, full=st.sampled_from([False, False, False, True]))
    def put(self, user: str, nbytes: int, full: bool) -> None:
        self.number += 1
        key = f"{user}@{self.number}"
        try:
            self.quietly_failing(full, lambda: put(self.backend, user, key, nbytes, self.number))
        except PoolFullError:
            assert self.backend.locate(user, [key]) == [None]
        else:
            self.objects[user, key] = nbytes, self.number

    @rule(user=USERS, nbytes=st.sampled_from([100, 1024, 5000]))
    def put_record(self, user: str, nbytes: int) -> None:
        self.number += 1
        data = self.number.to_bytes(4, "big") * (nbytes // 4)
        try:
            self.backend.put_record(user, f"{user}@record", data)
        except PoolFullError:
            self.records.setdefault(user, {None})
        else:
            self.records[user] = {data, None}

    @rule(user=USERS)
    def request(self, user: str) -> None:
        self.backend.count_request(user)

    @rule(user=USERS)
    def get_record(self, user: str) -> None:
        assert self.backend.get_record(user, f"{user}@record") in self.records.get(user, {None})

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        user, key = data.draw(st.sampled_from(sorted(self.objects)))
        nbytes, seed = self.objects[user, key]
        try:
            assert read(self.backend, user, key, nbytes) == contents(nbytes, seed)
        except ObjectMissingError:
            del self.objects[user, key]
        except ObjectCorruptError:
            assert self.damaged
            del self.objects[user, key]

    @precondition(lambda self: self.objects)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        user, key = data.draw(st.sampled_from(sorted(self.objects)))
        assert self.backend.remove(user, [key, "nothing"]) == []
        assert self.backend.locate(user, [key]) == [None]
        del self.objects[user, key]

    @precondition(lambda self: self.ssd)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        files = files_of(self.directory)
        if files:
            path = data.draw(st.sampled_from(files))
            os.truncate(path, path.stat().st_size // 2)
            self.damaged = True

    @rule()
    def restart(self) -> None:
        self.backend.close()
        self.open()
        if not self.ssd:
            self.objects.clear()
            self.records.clear()

    @invariant()
    def budgets_hold(self) -> None:
        if not hasattr(self, "backend"):
            return
        settle(self.backend)
        for usage in self.backend.usage():
            assert usage.used <= usage.budget
            if usage.tier is Tier.SSD:
                assert disk_usage(self.directory) <= usage.used
                names = len(files_of(self.directory)) + 4
                assert self.damaged or usage.used <= disk_usage(self.directory) + ENTRY_BYTES * names
        self.backend._index.check_integrity()

    def quietly_failing(self, failing: bool, call: object) -> None:
        """Make the call, with a device that is full if ``failing``."""
        pwritev = os.pwritev

        def full(*args: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        if failing:
            os.pwritev = full  # type: ignore[assignment]
        try:
            call()  # type: ignore[operator]
            settle(self.backend)
        finally:
            os.pwritev = pwritev

    def teardown(self) -> None:
        if hasattr(self, "backend"):
            self.backend.close()
            shutil.rmtree(self.directory)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
