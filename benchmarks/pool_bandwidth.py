"""How fast users go into the pool and come out of it, against what the machine can do at best.

    .venv/bin/python benchmarks/pool_bandwidth.py --json /tmp/pool.json

A user is extents of up to 16 MiB, each scattered over regions of 128 KiB, as an engine's KV blocks are. Everything is
measured in one process, taking turns, so that a busy moment of the machine hits all rows alike; figures are medians.
The bounds are one copy of the same bytes in memory, one read of them from a file in the kernel's cache, and one write
of them to a new file.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from userkv.store.backend import PoolBackend, Region
from userkv.store.local import LocalBackend

MIB = 1 << 20
SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
EXTENT = 16 * MIB
ALIGNMENT = 64
COPY = "copy in memory"
READ = "read of a cached file"
WRITE = "write of a new file"


class Bytes:
    """A user's KV in an engine's memory: extents, each of them regions at random places.

    Args:
        nbytes: the user's size.
        region_bytes: size of a region.

    """

    def __init__(self, nbytes: int, region_bytes: int) -> None:
        # Engines' tensors are aligned; what is not is copied at half the speed on some CPUs.
        memory = np.random.default_rng(0).integers(0, 255, nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.array = memory[start : start + nbytes]
        self.whole = Region(self.array.ctypes.data, nbytes)
        starts = list(range(0, nbytes, region_bytes))
        random.Random(0).shuffle(starts)
        regions = [Region(self.whole.address + start, min(region_bytes, nbytes - start)) for start in starts]
        per_extent = EXTENT // region_bytes
        self.extents = [regions[i : i + per_extent] for i in range(0, len(regions), per_extent)]


class PoolOfUsers:
    """Puts and gets whole users of a backend; the user before goes, so that there is always room."""

    def __init__(self, backend: PoolBackend) -> None:
        self._backend = backend
        self._number = time.monotonic_ns()  # No key of an earlier one is used again.
        self._keys: list[str] = []

    def put(self, source: Bytes) -> None:
        self._keys = [f"{self._number}@{extent}" for extent in range(len(source.extents))]
        for key, parts in zip(self._keys, source.extents, strict=True):
            self._backend.put(str(self._number), key, parts)

    def get(self, target: Bytes) -> None:
        for key, parts in zip(self._keys, target.extents, strict=True):
            self._backend.get(str(self._number), key, parts)

    def rest(self) -> None:
        """Wait until the backend's own thread is done, which would steal from what is measured next."""
        while isinstance(self._backend, LocalBackend) and self._backend.counters()["queued_users"]:
            time.sleep(0.001)

    def remove(self) -> None:
        self._backend.remove(str(self._number), self._keys)
        self._number += 1


def read_file(descriptor: int, target: Bytes) -> None:
    view = memoryview(target.array)
    offset = 0
    while offset < target.whole.nbytes:
        offset += os.preadv(descriptor, [view[offset:]], offset)


def write_file(path: Path, source: Bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(source.array)
        while view:
            view = view[file.write(view) :]


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextmanager
def local_backends(directory: Path) -> Iterator[dict[str, PoolBackend]]:
    """The embedded backend with memory alone, with files alone, and with both."""
    memory = 4 * max(SIZES)
    backends: dict[str, PoolBackend] = {
        "local, DRAM": LocalBackend(memory, None, 0),
        "local, SSD": LocalBackend(0, directory / "ssd", 2 * memory),
        "local, DRAM with files written behind": LocalBackend(memory, directory / "both", 2 * memory),
    }
    try:
        yield backends
    finally:
        for backend in backends.values():
            backend.close()


def measure(
    backends: dict[str, PoolBackend], nbytes: int, region_bytes: int, repeats: int, directory: Path
) -> dict[str, list[float]]:
    """Seconds of every repeat, by row."""
    source, target, copy = (Bytes(nbytes, region_bytes) for _ in range(3))
    pools = {name: PoolOfUsers(backend) for name, backend in backends.items()}
    for backend in backends.values():
        backend.register([source.whole, target.whole])
    path = directory / "plain"
    path.write_bytes(source.array.tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    times: dict[str, list[float]] = {}

    def record(row: str, work: Callable[[], None]) -> None:
        times.setdefault(row, []).append(seconds(work))

    for repeat in range(repeats + 2):
        record(COPY, lambda: ctypes.memmove(copy.whole.address, source.whole.address, nbytes) and None)
        record(READ, lambda: read_file(descriptor, copy))
        path.with_name("new").unlink(missing_ok=True)
        record(WRITE, lambda: write_file(path.with_name("new"), source))
        for name, pool in pools.items():
            target.array[:] = 0
            record(f"put, {name}", lambda pool=pool: pool.put(source))
            pool.rest()
            record(f"get, {name}", lambda pool=pool: pool.get(target))
            assert np.array_equal(source.array, target.array), name
            pool.rest()
            pool.remove()
        if repeat == 1:  # The kernel has cleared all memory by now, and files are in its cache.
            times.clear()
    os.close(descriptor)
    return times


def table(results: dict[int, dict[str, float]]) -> Iterator[str]:
    """Markdown: GB/s, and the ratio to the copy (for files, to the read or write of one, too)."""
    yield "| | " + " | ".join(f"{size // MIB} MiB" for size in results) + " |"
    yield "|---|" + "---:|" * len(results)
    for row in next(iter(results.values())):
        cells = []
        for size, medians in results.items():
            cell = f"{size / medians[row] / 1e9:.1f} ({medians[COPY] / medians[row]:.2f}x"
            if "SSD" in row:
                bound = READ if row.startswith("get") else WRITE
                cell += f", {medians[bound] / medians[row]:.2f}x the {bound.split()[0]}"
            cells.append(cell + ")")
        yield f"| {row} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="bandwidth of the pool, against that of memory and of a cached file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--region-kib", type=int, default=128, help="size of a KV block of one layer")
    parser.add_argument("--directory", type=Path, default=None, help="where to put files (default: a temporary one)")
    parser.add_argument("--mooncake", action="store_true", help="measure Mooncake, too")
    parser.add_argument("--json", type=Path, help="file for the seconds of every repeat")
    args = parser.parse_args(arguments)
    everything = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)))
        backends = stack.enter_context(local_backends(directory))
        if args.mooncake:
            from pool_bandwidth_mooncake import mooncake_backends

            backends |= stack.enter_context(mooncake_backends(directory))
        for size in SIZES:
            everything[size] = measure(backends, size, args.region_kib << 10, args.repeats, directory)
    medians = {
        size: {row: statistics.median(times) for row, times in rows.items()} for size, rows in everything.items()
    }
    print(f"GB/s and ratio to the copy; regions of {args.region_kib} KiB, medians of {args.repeats}\n")
    print("\n".join(table(medians)))
    if args.json:
        args.json.write_text(json.dumps({"region_kib": args.region_kib, "seconds": everything}, indent=1))


if __name__ == "__main__":
    main()
