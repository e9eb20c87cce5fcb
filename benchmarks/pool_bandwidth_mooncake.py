"""How fast users go into a Mooncake pool and come out of it, against Mooncake's own plainest calls.

    .venv/bin/python benchmarks/pool_bandwidth_mooncake.py --json /tmp/mooncake.json

A user of 64 MiB is four extents of 16 MiB, each scattered over regions of 128 KiB, as an engine's KV blocks are. The
bound is one ``get_into`` (``put_from``) of the same bytes, in one object and in one piece. Everything is measured in
one process, taking turns; figures are medians. "in this process" means that the pool's memory belongs to the process
that measures, "of another process" that it is reached over TCP. ``pool_bandwidth.py --mooncake`` has the same pools.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pool_bandwidth import EXTENT, MIB, Bytes, ratios, seconds
from tests.support.backends import closing
from tests.support.mooncake import Master, owner

from userkv.store.backend import PoolBackend, Region
from userkv.store.mooncake.backend import MooncakeBackend

USER = 64 * MIB
SEGMENT = 2048 * MIB
LOAD_THREADS = 2
"""As many users as the connector loads at once. It reads the extents of each one after the other."""

OWN, OTHER = "memory in this process", "memory of another process, TCP"
PUT, GET = "put, 4 extents", "get, 4 extents, one after the other"
PLAIN_PUT, PLAIN_GET = "put_from, one object", "get_into, one object"


@contextmanager
def mooncake_pools(lease_ms: int = 5000) -> Iterator[dict[str, MooncakeBackend]]:
    """A pool whose memory is this process's own, and one whose memory is another's."""
    with ExitStack() as stack:
        pools = {}
        for name, own in ((OWN, SEGMENT), (OTHER, 0)):
            master = stack.enter_context(Master(lease_ms=lease_ms))
            if not own:
                stack.enter_context(owner(master, SEGMENT))
            pools[name] = stack.enter_context(closing(master.open(own)))
        yield pools


@contextmanager
def mooncake_backends(directory: Path) -> Iterator[dict[str, PoolBackend]]:
    """For ``pool_bandwidth.py``, which makes room by removing what it has just read."""
    with mooncake_pools(lease_ms=500) as pools:
        yield {f"Mooncake, {name}": pool for name, pool in pools.items()}


class Rows:
    """What is measured on one pool; every repeat puts under fresh keys."""

    def __init__(self, backend: MooncakeBackend, executor: ThreadPoolExecutor) -> None:
        self._backend = backend
        self._executor = executor
        self._repeat = 0
        self.source, self.target = Bytes(USER, 128 << 10), Bytes(USER, 128 << 10)
        self._sources, self._targets = (self._extents(kv) for kv in (self.source, self.target))
        backend.register([self.source.whole, self.target.whole])

    @staticmethod
    def _extents(kv: Bytes) -> list[list[Region]]:
        per_extent = EXTENT // kv.layout.block_nbytes
        return [kv.layout.regions(kv.blocks[i : i + per_extent], [0]) for i in range(0, len(kv.blocks), per_extent)]

    def works(self) -> dict[str, Callable[[], None]]:
        """The rows in the order in which they are measured."""
        self._repeat += 1
        return {
            PLAIN_PUT: self._put_from,
            PLAIN_GET: self._get_into,
            PUT: self._put,
            "locate, 4 extents": self._locate,
            GET: self._get,
            f"get, 4 extents, {LOAD_THREADS} threads": self._get_in_threads,
        }

    def remove(self) -> None:
        """Make room, whatever is leased."""
        with self._backend._connection.use() as client:
            client.store.batch_remove([*self._keys, self._plain], True)

    def check(self, row: str) -> None:
        """What was read is what was put."""
        if row.startswith("get"):
            assert np.array_equal(self.source.array, self.target.array), row
            self.target.array[:] = 0

    @property
    def _keys(self) -> list[str]:
        return [f"{self._repeat}@{extent}" for extent in range(USER // EXTENT)]

    @property
    def _plain(self) -> str:
        return f"{self._repeat}@plain"

    def _put_from(self) -> None:
        with self._backend._connection.use() as client:
            code = client.store.put_from(self._plain, *self.source.whole)
        assert code == 0, code

    def _get_into(self) -> None:
        with self._backend._connection.use() as client:
            assert client.store.get_into(self._plain, *self.target.whole) == USER

    def _put(self) -> None:
        for key, parts in zip(self._keys, self._sources, strict=True):
            self._backend.put(str(self._repeat), key, parts)

    def _locate(self) -> None:
        assert None not in self._backend.locate(str(self._repeat), self._keys)

    def _get(self) -> None:
        for key, parts in zip(self._keys, self._targets, strict=True):
            self._backend.get(str(self._repeat), key, parts)

    def _get_in_threads(self) -> None:
        work = zip(self._keys, self._targets, strict=True)
        list(self._executor.map(lambda it: self._backend.get(str(self._repeat), *it), work))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="bandwidth of a Mooncake pool, against Mooncake's plainest calls")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="file for the ratios, and for the seconds of every repeat")
    args = parser.parse_args(arguments)
    times: dict[str, dict[str, list[float]]] = {}
    with mooncake_pools() as pools, ThreadPoolExecutor(LOAD_THREADS) as executor:
        rows = {name: Rows(pool, executor) for name, pool in pools.items()}
        for repeat in range(args.repeats + 2):
            for name, pool in rows.items():
                for row, work in pool.works().items():
                    times.setdefault(name, {}).setdefault(row, []).append(seconds(work))
                    pool.check(row)
                pool.remove()
            if repeat == 1:  # All memory has been touched by now.
                times.clear()
    for name, of_pool in times.items():
        medians = {row: statistics.median(values) for row, values in of_pool.items()}
        print(f"\n{name}: {USER // MIB} MiB, medians of {args.repeats}\n")
        print("| | ms | GB/s | of the plain call |\n|---|---:|---:|---:|")
        for row, median in medians.items():
            bound = medians[PLAIN_PUT if row.startswith("put") else PLAIN_GET]
            speed = "" if row.startswith("locate") else f"{USER / median / 1e9:.1f} | {bound / median:.2f}"
            print(f"| {row} | {median * 1e3:.1f} | {speed or ' | '} |")
    if args.json:
        figures = {}
        for short, name in (("own", OWN), ("tcp", OTHER)):
            wanted = {f"get_{short}_ratio": (GET, PLAIN_GET), f"put_{short}_ratio": (PUT, PLAIN_PUT)}
            figures |= ratios(times[name], wanted)
        args.json.write_text(json.dumps({"figures": figures, "seconds": times}, indent=1))


if __name__ == "__main__":
    main()
