"""``MooncakeEngine``: moves extents between the engine's KV memory and the pool."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from userkv.engine.pool.wire.messages import LoadJob, SaveJob
from userkv.engine.pool.worker.kv_layout import KVLayout
from userkv.engine.pool.worker.kv_memory import KVMemory
from userkv.store.backend import StoreError
from userkv.store.user_store import MooncakeUserStore


@dataclass(slots=True)
class Loaded:
    """How a load went.

    Attributes:
        nbytes: bytes read.
        bad_blocks: the engine's blocks that do not hold what they should.
        error: why, if there are any.

    """

    nbytes: int = 0
    bad_blocks: set[int] = field(default_factory=set)
    error: StoreError | None = None


class MooncakeEngine:
    """Loads and saves of one worker. Thread-safe; every call blocks until the bytes are moved.

    Args:
        store: the users' objects of this worker.
        layout: where KV lies.
        memory: how to reach it.
        layerwise: one object per layer.
        parallel_gets: threads that one load reads its extents with; the caller is one of them.
        helpers: how many more threads all loads share for that; they start when they are needed.

    """

    def __init__(
        self,
        store: MooncakeUserStore,
        layout: KVLayout,
        memory: KVMemory,
        *,
        layerwise: bool,
        parallel_gets: int = 1,
        helpers: int = 0,
    ) -> None:
        self.num_layers = len(layout.layer_names)
        self.layers = {name: layer for layer, name in enumerate(layout.layer_names)}
        self._store = store
        self._layout = layout
        self._memory = memory
        self._layerwise = layerwise
        self._parallel_gets = parallel_gets
        self._helpers = ThreadPoolExecutor(max(1, helpers), "KVCacheStoreRecvingHelper")

    def load(self, job: LoadJob, layer: int | None = None) -> Loaded:
        """Read the extents of a job: all layers, or one (layerwise mode). Never raises a :class:`StoreError`."""
        load = _Load(job.reads)
        helpers = min(self._parallel_gets, len(job.reads)) - 1
        futures = [self._helpers.submit(self._read_extents, load, job, layer) for _ in range(helpers)]
        try:
            self._read_extents(load, job, layer)
        finally:
            # Nobody writes to the blocks any more when this is over; a helper that was busy elsewhere is not needed.
            wait([future for future in futures if not future.cancel()])
        for future in futures:
            if not future.cancelled():
                future.result()
        loaded = Loaded(load.nbytes, error=load.error)
        # The request is cut at its first bad block, so what was read behind that is of no use.
        for read in job.reads[load.failed :]:
            loaded.bad_blocks |= {job.block_ids[index] for index in read.wanted if index is not None}
        return loaded

    def close(self) -> None:
        """Let the helping threads end when they have nothing to do."""
        self._helpers.shutdown(wait=False)

    def _read_extents(self, load: "_Load", job: LoadJob, layer: int | None) -> None:
        """Read extents until none is left or one has failed. Several threads do that together."""
        while (at := load.next()) is not None:
            read = job.reads[at]
            targets = [None if index is None else job.block_ids[index] for index in read.wanted]
            try:
                for layers, key_layer in self._objects(layer):
                    with self._memory.write(self._layout.regions(targets, layers)) as parts:
                        self._store.get_extent(job.uid, job.namespace, read.extent, parts, key_layer)
                    load.add(sum(part.nbytes for part in parts))
            except StoreError as error:
                load.fail(at, error)

    def save(self, job: SaveJob, layer: int | None = None, after: Any = None) -> int:
        """Write the extents of a job: all layers, or one (layerwise mode).

        Args:
            job: what to write.
            layer: only this layer.
            after: the mark in the computation behind which the KV is complete; ``None``: it is.

        Returns:
            Bytes written.

        Raises:
            StoreError: not all was written.

        """
        nbytes = 0
        for extent, block_ids in job.extents:
            for layers, key_layer in self._objects(layer):
                parts = self._layout.regions(block_ids, layers, apart=job.live_block)
                live = self._layout.regions([job.live_block], layers) if job.live_block in block_ids else ()
                with self._memory.read(parts, live, after) as stable:
                    self._store.put_extent(job.uid, job.namespace, extent, stable, key_layer)
                nbytes += sum(part.nbytes for part in parts)
        return nbytes

    def _objects(self, layer: int | None) -> Iterator[tuple[Sequence[int], int | None]]:
        """The objects of an extent: the layers in each, and the layer in its key."""
        if not self._layerwise:
            yield range(self.num_layers), None
        else:
            for each in range(self.num_layers) if layer is None else (layer,):
                yield (each,), each


class _Load:
    """The state of a load that several threads share."""

    def __init__(self, reads: Sequence[Any]) -> None:
        self.nbytes = 0
        self.failed = len(reads)
        self.error: StoreError | None = None
        self._waiting = deque(range(len(reads)))
        self._lock = threading.Lock()

    def next(self) -> int | None:
        """The number of an extent to read; ``None`` if there is none, or it would be in vain."""
        with self._lock:
            return self._waiting.popleft() if self._waiting and self.error is None else None

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    def fail(self, at: int, error: StoreError) -> None:
        """An extent could not be read; the first one counts."""
        with self._lock:
            if at < self.failed:
                self.failed, self.error = at, error
