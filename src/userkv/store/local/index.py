"""Who has what, where: users, their objects, the bytes they take in each tier, and the order in which users go.

Nothing here does I/O, and nothing scans users. A million of them cost about a gigabyte.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field

from userkv.cache.policies import make_policy
from userkv.cache.policies.grace import GracePeriod
from userkv.cache.policies.lru import UserKVLRUManager
from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.errors import IntegrityError
from userkv.store.local.arena import Arena, Block
from userkv.store.local.ssd_files import USER_BYTES, file_cost

GRACE_SECONDS = 2.0
"""How long a user who was used stays if others can go: until a request that has found him here loads him, or the next
of his objects comes. A policy that counts requests would drop a new user, who is worth least, between the two."""


@dataclass(slots=True, eq=False)
class Entry:
    """An object: in memory, in a file, or both.

    Attributes:
        name: the key's digest.
        nbytes: its size.
        checksum: of its bytes; known while it is in memory.
        block: its memory; ``None`` if it is not in memory.
        on_ssd: whether its file holds exactly these bytes.

    """

    name: bytes
    nbytes: int
    checksum: int | None = None
    block: Block | None = None
    on_ssd: bool = False


@dataclass(slots=True, eq=False)
class User:
    """An eviction group.

    Attributes:
        name: the group's digest.
        entries: its objects, in the order in which they were put.
        dram: bytes of the budget in memory, those of puts that are still copying included.
        ssd: bytes of the budget on the SSD, those of files that are still being written included.
        files: objects whose files are counted in ``ssd``.
        holds: operations that need the user to stay.
        unwritten: bytes put since the last time that the user was written to the SSD.

    """

    name: bytes
    entries: dict[bytes, Entry] = field(default_factory=dict)
    dram: int = 0
    ssd: int = 0
    files: int = 0
    holds: int = 0
    unwritten: int = 0


class Index:
    """All users of a pool. Its lock, ``changed``, guards all of it: callers take it for every call and every look.

    A user with an operation in progress is *held*: in no order of eviction, so that whoever needs room finds a victim
    at once. Being held and released is a use.

    Users leave the last tier, and so the pool, in the order of a policy. Memory above an SSD is where puts wait to be
    written, so there it is the one used longest ago who goes: he was written long ago, too.

    Args:
        arena: the memory.
        ssd_budget: bytes on the SSD; 0 if there is none.
        policy: the name of the last tier's order. Orders know users by their names, so that somebody who comes back
            after his eviction is the same user.

    """

    def __init__(self, arena: Arena, ssd_budget: int, policy: str) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.counts: Counter[str] = Counter()
        self.arena = arena
        self.ssd_budget = ssd_budget
        self.ssd_used = 0
        self.unwritten = 0
        self.holds = 0
        self._last_order = GracePeriod[bytes](make_policy(policy, ssd_budget or arena.budget), GRACE_SECONDS)
        self._dram_order: EvictionPolicy[bytes] = UserKVLRUManager() if ssd_budget else self._last_order
        self._ssd_order: EvictionPolicy[bytes] = self._last_order if ssd_budget else UserKVLRUManager()
        self._users: dict[bytes, User] = {}

    def __len__(self) -> int:
        return len(self._users)

    def find(self, name: bytes) -> User | None:
        """The user, if it has anything."""
        return self._users.get(name)

    def count_request(self, name: bytes) -> None:
        """A request asks for a user. What somebody takes who is not here is not known: the average of those who are."""
        user = self._users.get(name)
        used = self.ssd_used if self.ssd_budget else self.arena.used
        size = 0 if user is None else user.ssd if self.ssd_budget else user.dram
        self._last_order.count_request(name, size or used // max(1, len(self._users)))

    def dram_victim(self) -> User | None:
        """Who leaves memory next; ``None`` if nobody can."""
        name = self._dram_order.victim()
        return None if name is None else self._users[name]

    def ssd_victim(self) -> User | None:
        """Who leaves the SSD next; ``None`` if nobody can."""
        name = self._ssd_order.victim()
        return None if name is None else self._users[name]

    def hold(self, user: User) -> None:
        """Keep a user until it is released; calls nest. He may be gone already, and another one have his name."""
        self.holds += 1
        user.holds += 1
        if self._users.get(user.name) is user:
            self._dram_order.discard(user.name)
            self._ssd_order.discard(user.name)

    def hold_name(self, name: bytes) -> User:
        """Hold the user of this name, a new one if need be."""
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = User(name)
        self.hold(user)
        return user

    def release(self, user: User) -> None:
        """End a hold. After the last one, the user has just been used and may be evicted; who has nothing is gone."""
        self.holds -= 1
        user.holds -= 1
        if user.holds:
            return
        self.changed.notify_all()
        if self._users.get(user.name) is not user:
            return
        if not user.entries:
            del self._users[user.name]
            return
        if user.dram:
            self._dram_order.add(user.name)
        if user.ssd:
            self._ssd_order.add(user.name)

    def allocate(self, user: User, nbytes: int) -> Block | None:
        """Memory for an object of a user, or ``None``."""
        block = self.arena.allocate(nbytes)
        if block is not None:
            user.dram += block.cost
        return block

    def free(self, user: User, block: Block) -> None:
        """Take memory back."""
        user.dram -= block.cost
        self.arena.free(block)

    def forget_block(self, user: User, entry: Entry) -> None:
        """The object is not in memory any more; what it took is free as soon as nobody reads it."""
        block, entry.block = entry.block, None
        if block is None:
            return
        if block.readers:
            block.orphan = True
        else:
            self.free(user, block)

    def end_read(self, user: User, block: Block) -> None:
        """One reader less."""
        block.readers -= 1
        if block.orphan and not block.readers:
            self.free(user, block)

    def check_integrity(self) -> None:
        """For tests.

        Raises:
            IntegrityError: the books are wrong.

        """
        users = self._users.values()
        for user in users:
            files = [entry.nbytes for entry in user.entries.values() if entry.on_ssd]
            blocks = [entry.block for entry in user.entries.values() if entry.block is not None]
            right = (
                user.holds == 0
                and bool(user.entries)
                and user.dram == sum(block.cost for block in blocks)
                and not any(block.readers or block.orphan for block in blocks)
                and (user.files, user.ssd) == (len(files), sum(map(file_cost, files)) + USER_BYTES * bool(files))
                and (user.name in self._dram_order, user.name in self._ssd_order) == (bool(blocks), bool(files))
            )
            if not right:
                raise IntegrityError(f"user {user} is not in order")
        if self.holds or self.ssd_used != sum(user.ssd for user in users):
            raise IntegrityError(f"{self.holds} users are held, {self.ssd_used} bytes counted on the SSD")
        self.arena.check_integrity([e.block for user in users for e in user.entries.values() if e.block is not None])

    def file_cost(self, user: User, nbytes: int) -> int:
        """What one more file of a user takes."""
        return file_cost(nbytes) + (0 if user.files else USER_BYTES)

    def count_file(self, user: User, nbytes: int) -> None:
        """Count a file that is there, whatever the budget."""
        cost = self.file_cost(user, nbytes)
        user.files += 1
        user.ssd += cost
        self.ssd_used += cost

    def forget_file(self, user: User, nbytes: int) -> None:
        """A file is not there any more."""
        user.files -= 1
        cost = self.file_cost(user, nbytes)
        user.ssd -= cost
        self.ssd_used -= cost
