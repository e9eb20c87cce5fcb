"""Engines whose workers save and load users on one pool, for tests of the user store."""

import ctypes
import itertools
from dataclasses import dataclass, replace

import xxhash

from tests.support.faulty_backend import FaultyBackend
from tests.support.memory_backend import MemoryBackend
from userkv.core.tokens import as_tokens
from userkv.records.load_plan import plan_load, usable_part, usable_tokens
from userkv.records.record import Extent, RecordError, UserRecord
from userkv.records.save_plan import SavePlan, plan_save
from userkv.store.backend import Region
from userkv.store.user_store import MooncakeUserStore

BLOCK, BYTES, LAYERS, WORKERS = 2, 8, 2, 2
USERS = ("u", "u@n")
NAMESPACE = "model/v1"


class Clock:
    """Goes on by some microseconds whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 2e-6
        return self.now


@dataclass(eq=False)
class Save:
    """A save between its plan and its commit."""

    uid: str
    plan: SavePlan
    base_generation: int
    epoch: int


class Engine:
    """The workers of one engine. KV of a block is a hash of who, where and of all tokens up to the block's end."""

    def __init__(
        self, pool: MemoryBackend | FaultyBackend, num_layers: int, ids: "itertools.count[int]", clock: Clock
    ) -> None:
        self.clock, self.monotonic = clock, Clock()
        self.layers = list(range(num_layers)) or [None]
        self.workers = [
            MooncakeUserStore(pool, WORKERS, worker, num_layers, self.clock, self.monotonic)
            for worker in range(WORKERS)
        ]
        self.ids = ids

    def answer(self, uid: str) -> tuple[UserRecord | None, list[bool]]:
        """The record, and which of its extents all workers have."""
        record = self.workers[0].lookup(uid, NAMESPACE)
        if record is None:
            return None, []
        votes = [worker.present(uid, NAMESPACE, record.extents) for worker in self.workers]
        return record, [None not in tiers for tiers in zip(*votes, strict=True)]

    def begin(self, uid: str, history: list[int], ttl: float = 0, epoch: int = 0) -> Save | None:
        record, present = self.answer(uid)
        base = record
        if record is not None and not all(present):
            base = usable_part(record, present) or UserRecord.tombstone(record.generation, "", 0.0)
        plan = plan_save(
            base,
            as_tokens(history),
            BLOCK,
            max_extent_blocks=3,
            new_id=lambda: next(self.ids),
            writer="w",
            now=self.clock(),
            ttl_seconds=ttl,
            max_small_extents=2,
        )
        return None if plan is None else Save(uid, plan, 0 if base is None else base.generation, epoch)

    def write(self, save: Save) -> None:
        tokens = save.plan.record.tokens.tolist()
        for worker, extent, layer in self.objects(save.plan.new_extents):
            blocks = range(extent.first_block, extent.end_block)
            data = b"".join(self.kv(save.uid, worker, layer, tokens, block) for block in blocks)
            memory = ctypes.create_string_buffer(data, len(data))
            self.workers[worker].put_extent(save.uid, NAMESPACE, extent, regions(memory), layer)

    def commit(self, save: Save) -> bool:
        uid, plan = save.uid, save.plan
        result = self.workers[0].commit(uid, NAMESPACE, plan.record, save.base_generation)
        assert result.committed == (not result.reason)
        self.remove(uid, result.garbage if result.committed else plan.new_extents)
        if result.committed:
            expired = result.record.expired(self.clock())
            assert self.answer(uid)[0] == (None if expired else result.record)
            assert result.record == replace(plan.record, generation=result.record.generation)
            assert result.record.generation > save.base_generation
        return result.committed

    def save(self, uid: str, history: list[int], ttl: float = 0) -> bool:
        save = self.begin(uid, history, ttl)
        assert save is not None
        self.write(save)
        return self.commit(save)

    def remove(self, uid: str, extents: tuple[Extent, ...]) -> None:
        for worker in self.workers:
            worker.remove_extents(uid, NAMESPACE, extents)

    def load(self, uid: str) -> list[int]:
        """All that can be loaded of a user; every byte of it is checked."""
        record, present = self.answer(uid)
        if record is None:
            return []
        tokens = record.tokens[: usable_tokens(record, present)].tolist()
        reads = plan_load(record, 0, -(-len(tokens) // BLOCK))
        wanted = {read.extent: read.wanted for read in reads}
        for worker, extent, layer in self.objects(tuple(wanted)):
            memory = ctypes.create_string_buffer(extent.num_blocks * BYTES)
            self.workers[worker].get_extent(uid, NAMESPACE, extent, regions(memory), layer)
            for place, target in enumerate(wanted[extent]):
                if target is not None:
                    kv = self.kv(uid, worker, layer, record.tokens.tolist(), target)
                    assert memory.raw[place * BYTES : (place + 1) * BYTES] == kv
        return tokens

    def objects(self, extents: tuple[Extent, ...]) -> list[tuple[int, Extent, int | None]]:
        return list(itertools.product(range(WORKERS), extents, self.layers))

    def kv(self, uid: str, worker: int, layer: int | None, tokens: list[int], block: int) -> bytes:
        return xxhash.xxh3_64_digest(repr((uid, worker, layer, tokens[: (block + 1) * BLOCK])).encode())

    def keys(self, uid: str, extents: tuple[Extent, ...]) -> set[str]:
        return {key for worker in self.workers for extent in extents for key in worker.keys_of(uid, NAMESPACE, extent)}


def regions(memory: "ctypes.Array[ctypes.c_char]") -> list[Region]:
    address, half = ctypes.addressof(memory), len(memory) // 2
    return [Region(address, half), Region(address + half, len(memory) - half)]


def record_key(uid: str) -> str:
    quoted = {"u": "u", "u@n": "u%40n"}[uid]
    return f"{quoted}@model%2Fv1@2@0@token_id"


def group_name(uid: str) -> str:
    return record_key(uid).removesuffix("@2@0@token_id")


def stored(pool: MemoryBackend, uid: str) -> UserRecord | None:
    """The record as it lies in the pool, expired or not."""
    try:
        return UserRecord.decode(pool.objects.get(record_key(uid), b""), uid, NAMESPACE)
    except RecordError:
        return None


class UserBench:
    """One engine on a pool that can fail, with one user who has four blocks in two extents."""

    def __init__(self, num_layers: int = 0) -> None:
        self.memory = MemoryBackend()
        self.faulty = FaultyBackend(self.memory)
        self.engine = Engine(self.faulty, num_layers, itertools.count(1), Clock())
        self.store = self.engine.workers[0]
        assert self.engine.save("u", list(range(8)))
        self.record = self.engine.answer("u")[0]
        assert self.record is not None
        self.extents = self.record.extents
        assert [extent.num_blocks for extent in self.extents] == [3, 1]

    def keys(self) -> set[str]:
        return self.engine.keys("u", self.extents)


def begin(bench: UserBench, history: list[int]) -> Save:
    save = bench.engine.begin("u", history)
    assert save is not None
    bench.engine.write(save)
    return save
