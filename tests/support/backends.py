"""Pool backends for tests, by name, and memory to put from and get into."""

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from userkv.cache.policies import ADAPTIVE
from userkv.store.backend import PoolBackend, Region
from userkv.store.local import LocalBackend
from userkv.store.regions import region_of

BUDGET = 8 << 20
"""Bytes that a backend of :data:`BACKENDS` holds: all its tiers together, roughly."""

Factory = Callable[[Path], AbstractContextManager[PoolBackend]]


class Memory:
    """Bytes to put, or room for them, scattered over one buffer in pieces that lie in random order.

    Keep it for as long as its parts are in use: they are addresses, which keep nothing alive.

    Args:
        sizes: of the pieces; ``None`` cuts ``nbytes`` into odd ones.
        nbytes: all pieces together.
        seed: order of the pieces, sizes and contents.

    """

    def __init__(self, nbytes: int, seed: int = 0, sizes: Sequence[int] | None = None) -> None:
        self._random = random.Random(seed)
        sizes = self._cut(nbytes) if sizes is None else sizes
        gap = 64
        self.buffer = bytearray(nbytes + gap * len(sizes))
        base = region_of(self.buffer).address
        order = list(range(len(sizes)))
        self._random.shuffle(order)
        places = [0] * len(sizes)
        offset = 0
        for piece in order:
            places[piece] = offset
            offset += sizes[piece] + gap
        self.parts = [Region(base + place, size) for place, size in zip(places, sizes, strict=True)]

    @property
    def data(self) -> bytes:
        """The bytes of the pieces, in order."""
        return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in self.parts)

    def _cut(self, nbytes: int) -> list[int]:
        sizes = []
        while nbytes:
            sizes.append(min(nbytes, self._random.choice((1, 7, 333, 4096, 70_001, 600_000))))
            nbytes -= sizes[-1]
        return sizes


def filled(nbytes: int, seed: int = 0) -> Memory:
    """Memory with contents of its own for every seed."""
    memory = Memory(nbytes, seed)
    contents = random.Random(f"{nbytes} {seed}").randbytes(nbytes)
    offset = 0
    for address, size in memory.parts:
        ctypes.memmove(address, contents[offset : offset + size], size)
        offset += size
    return memory


def read(backend: PoolBackend, user: str, key: str, nbytes: int, seed: int = 1) -> bytes:
    """An extent's bytes, through pieces that are others than those it was put from."""
    memory = Memory(nbytes, seed)
    backend.get(user, key, memory.parts)
    return memory.data


@contextmanager
def closing(backend: PoolBackend) -> Iterator[PoolBackend]:
    """Close a backend at the end."""
    try:
        yield backend
    finally:
        backend.close()


def _mooncake(kind: str) -> Factory:
    def open_one(directory: Path) -> AbstractContextManager[PoolBackend]:
        from tests.support import mooncake  # Late: its libraries are large, and it imports this module.

        factory: Factory = getattr(mooncake, kind)
        return factory(directory)

    return open_one


MOONCAKE: dict[str, Factory] = {
    "mooncake": _mooncake("own_memory"),
    "mooncake, memory of another process": _mooncake("others_memory"),
    "mooncake, client process": _mooncake("client_process"),
}

BACKENDS: dict[str, Factory] = {
    "local, DRAM": lambda directory: closing(LocalBackend(BUDGET, None, 0)),
    "local, SSD": lambda directory: closing(LocalBackend(0, directory, BUDGET)),
    "local, DRAM and SSD": lambda directory: closing(LocalBackend(BUDGET // 4, directory, BUDGET)),
    "local, adaptive": lambda directory: closing(LocalBackend(BUDGET // 4, directory, BUDGET, policy=ADAPTIVE)),
    **MOONCAKE,
}
"""Backends that the contract's tests run over. Those that need servers are in :data:`SLOW` too."""

SLOW: set[str] = {*MOONCAKE}
"""Names of backends whose tests are marked e2e."""
