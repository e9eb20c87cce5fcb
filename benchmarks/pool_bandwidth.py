"""How fast users go into the pool and come out of it, against what the machine can do at best.

    .venv/bin/python benchmarks/pool_bandwidth.py --json /tmp/pool.json

A user is extents of up to 16 MiB, each scattered over blocks of 128 KiB, saved and loaded as the connector's worker
does it. Everything is measured in one process, taking turns, so that a busy moment of the machine hits all rows alike;
figures are medians. The bounds are one copy of the same bytes in memory, one read of them from a file (which the
kernel has in its cache, or has to read from the disk), and one write of them to a new file.
"""

import argparse
import ctypes
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from userkv.core.sizes import MIB
from userkv.engine.pool.wire.messages import LoadJob, SaveJob
from userkv.engine.pool.worker.kv_layout import KVLayout
from userkv.engine.pool.worker.kv_memory import HostKVMemory
from userkv.engine.pool.worker.mooncake_engine import MooncakeEngine
from userkv.records.load_plan import ExtentRead
from userkv.records.record import Extent
from userkv.store.backend import PoolBackend, Region
from userkv.store.local import LocalBackend
from userkv.store.user_store import MooncakeUserStore

SIZES = (1 * MIB, 8 * MIB, 64 * MIB)
EXTENT = 16 * MIB
ALIGNMENT = 64
COPY = "copy in memory"
READ = "read of a cached file"
READ_DISK = "read of a file from the disk"
SSD = "local, SSD"
WRITE = "write of a new file"


class Bytes:
    """A user's KV in an engine's memory: blocks at random places.

    Args:
        nbytes: the user's size.
        block_bytes: size of a block (of one layer, as the layers' tensors are apart).

    """

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        # Engines' tensors are aligned; what is not is copied at half the speed on some CPUs.
        memory = np.random.default_rng(0).integers(0, 255, nbytes + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        self.array = memory[start : start + nbytes]
        self.whole = Region(self.array.ctypes.data, nbytes)
        self.blocks = list(range(nbytes // block_bytes))
        random.Random(0).shuffle(self.blocks)
        self.layout = KVLayout.of({"layers.0": torch.from_numpy(self.array).view(-1, block_bytes)}, len(self.blocks))


class PoolOfUsers:
    """Saves and loads whole users as the connector's worker does; the user before goes, so that there is room."""

    def __init__(self, backend: PoolBackend, source: Bytes, target: Bytes) -> None:
        self._backend = backend
        self._store = MooncakeUserStore(backend, 1, 0)
        self._save, self._load = (self._engine(kv.layout) for kv in (source, target))
        self._number = time.monotonic_ns()  # No extent of an earlier one is used again.
        per_extent = EXTENT // source.layout.block_nbytes
        self._extents = [
            (first, tuple(source.blocks[first : first + per_extent]))
            for first in range(0, len(source.blocks), per_extent)
        ]

    def put(self) -> None:
        extents = tuple((extent, blocks) for extent, (_, blocks) in zip(self._named(), self._extents, strict=True))
        self._save.save(SaveJob(0, str(self._number), "benchmark", extents, -1))

    def get(self) -> None:
        reads = tuple(
            ExtentRead(extent, tuple(range(extent.first_block, extent.end_block))) for extent in self._named()
        )
        blocks = tuple(block for _, extent in self._extents for block in extent)
        loaded = self._load.load(LoadJob(0, "request", str(self._number), "benchmark", reads, blocks))
        assert loaded.error is None, loaded.error

    def rest(self) -> None:
        """Wait until the backend's own thread is done, which would steal from what is measured next."""
        while isinstance(self._backend, LocalBackend) and self._backend.counters()["queued_users"]:
            time.sleep(0.001)

    def remove(self) -> None:
        self._store.remove_extents(str(self._number), "benchmark", self._named())
        self._number += len(self._extents)

    def _engine(self, layout: KVLayout) -> MooncakeEngine:
        helpers = self._backend.parallel_gets - 1
        memory = HostKVMemory(layout.largest_piece, 1 + helpers)
        parallel_gets = self._backend.parallel_gets
        return MooncakeEngine(
            self._store, layout, memory, layerwise=False, parallel_gets=parallel_gets, helpers=helpers
        )

    def _named(self) -> list[Extent]:
        return [Extent(self._number + i, first, len(blocks)) for i, (first, blocks) in enumerate(self._extents)]


def read_file(path: Path, target: Bytes) -> None:
    with path.open("rb", buffering=0) as file:
        view = memoryview(target.array)
        while view:
            view = view[file.readinto(view) :]


def write_file(path: Path, source: Bytes) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(source.array)
        while view:
            view = view[file.write(view) :]


def drop_from_cache(paths: Iterable[Path]) -> None:
    """Make the kernel forget files, so that they are read from the disk next."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


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
        SSD: LocalBackend(0, directory / "ssd", 2 * memory),
        "local, DRAM with files written behind": LocalBackend(memory, directory / "both", 2 * memory),
    }
    try:
        yield backends
    finally:
        for backend in backends.values():
            backend.close()


def measure(
    backends: dict[str, PoolBackend], nbytes: int, block_bytes: int, repeats: int, directory: Path
) -> dict[str, list[float]]:
    """Seconds of every repeat, by row."""
    source, target, copy = (Bytes(nbytes, block_bytes) for _ in range(3))
    pools = {name: PoolOfUsers(backend, source, target) for name, backend in backends.items()}
    for backend in backends.values():
        backend.register([source.whole, target.whole])
    path, on_disk = directory / "plain", directory / "on disk"
    for file in (path, on_disk):  # Two, as the kernel caches in smaller pages what it has read from a disk.
        file.write_bytes(source.array.tobytes())
    times: dict[str, list[float]] = {}

    def record(row: str, work: Callable[[], None]) -> None:
        times.setdefault(row, []).append(seconds(work))

    for repeat in range(repeats + 2):
        record(COPY, lambda: ctypes.memmove(copy.whole.address, source.whole.address, nbytes) and None)
        record(READ, lambda: read_file(path, copy))
        drop_from_cache([on_disk])
        record(READ_DISK, lambda: read_file(on_disk, copy))
        path.with_name("new").unlink(missing_ok=True)
        record(WRITE, lambda: write_file(path.with_name("new"), source))
        for name, pool in pools.items():
            target.array[:] = 0
            record(f"put, {name}", pool.put)
            pool.rest()
            record(f"get, {name}", pool.get)
            assert np.array_equal(source.array, target.array), name
            pool.rest()
            if name == SSD:
                drop_from_cache(file for file in (directory / "ssd").rglob("*") if file.is_file())
                record(f"get, {name}, from the disk", pool.get)
            pool.remove()
        if repeat == 1:  # The kernel has cleared all memory by now, and files are in its cache.
            times.clear()
    return times


def table(results: dict[int, dict[str, float]]) -> Iterator[str]:
    """Markdown: GB/s, and the ratio to the copy (for files, to the read or write of one, too)."""
    yield "| | " + " | ".join(f"{size // MIB} MiB" for size in results) + " |"
    yield "|---|" + "---:|" * len(results)
    for row in next(iter(results.values())):
        cells = []
        for size, medians in results.items():
            cell = f"{size / medians[row] / 1e9:.1f} ({medians[COPY] / medians[row]:.2f}x"
            if SSD in row:
                bound = WRITE if row.startswith("put") else READ_DISK if row.endswith("disk") else READ
                cell += f", {medians[bound] / medians[row]:.2f}x the {bound.split()[0]}"
            cells.append(cell + ")")
        yield f"| {row} | {' | '.join(cells)} |"


RATIOS = {
    "get_dram_ratio": ("get, local, DRAM", COPY),
    "put_dram_ratio": ("put, local, DRAM", COPY),
    "get_cached_file_ratio": (f"get, {SSD}", READ),
    "get_disk_ratio": (f"get, {SSD}, from the disk", READ_DISK),
    "put_file_ratio": (f"put, {SSD}", WRITE),
}
"""Figure -> the row, and the bound whose speed is 1."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """What the figures of ``--json`` say of each one."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(times: dict[str, list[float]], wanted: dict[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """Speed of rows against their bounds, repeat by repeat."""
    return {
        name: spread([least / took for took, least in zip(times[row], times[bound], strict=True)])
        for name, (row, bound) in wanted.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="bandwidth of the pool, against that of memory and of a cached file")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--block-kib", type=int, default=128, help="size of a KV block of one layer")
    parser.add_argument("--directory", type=Path, default=None, help="where to put files (default: a temporary one)")
    parser.add_argument("--mooncake", action="store_true", help="measure Mooncake, too")
    parser.add_argument("--json", type=Path, help="file for the largest size's ratios, and all seconds")
    args = parser.parse_args(arguments)
    everything = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=args.directory)))
        backends = stack.enter_context(local_backends(directory))
        if args.mooncake:
            from pool_bandwidth_mooncake import mooncake_backends

            backends |= stack.enter_context(mooncake_backends(directory))
        for size in SIZES:
            everything[size] = measure(backends, size, args.block_kib << 10, args.repeats, directory)
    medians = {
        size: {row: statistics.median(times) for row, times in rows.items()} for size, rows in everything.items()
    }
    print(f"GB/s and ratio to the copy; blocks of {args.block_kib} KiB, medians of {args.repeats}\n")
    print("\n".join(table(medians)))
    if args.json:
        figures = ratios(everything[max(SIZES)], RATIOS)
        args.json.write_text(
            json.dumps({"figures": figures, "block_kib": args.block_kib, "seconds": everything}, indent=1)
        )


if __name__ == "__main__":
    main()
