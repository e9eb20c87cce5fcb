"""``MooncakeEngine``: moves extents between the engine's KV memory and the pool."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from userkv.engine.pool.device import KVMemory
from userkv.engine.pool.layout import KVLayout
from userkv.engine.pool.messages import LoadJob, SaveJob
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

    """

    def __init__(self, store: MooncakeUserStore, layout: KVLayout, memory: KVMemory, *, layerwise: bool) -> None:
        self.num_layers = len(layout.layer_names)
        self.layers = {name: layer for layer, name in enumerate(layout.layer_names)}
        self._store = store
        self._layout = layout
        self._memory = memory
        self._layerwise = layerwise

    def load(self, job: LoadJob, layer: int | None = None) -> Loaded:
        """Read the extents of a job: all layers, or one (layerwise mode). Never raises a :class:`StoreError`."""
        loaded = Loaded()
        for at, read in enumerate(job.reads):
            targets = [None if index is None else job.block_ids[index] for index in read.wanted]
            try:
                for layers, key_layer in self._objects(layer):
                    with self._memory.write(self._layout.regions(targets, layers)) as parts:
                        self._store.get_extent(job.uid, job.namespace, read.extent, parts, key_layer)
                    loaded.nbytes += sum(part.nbytes for part in parts)
            except StoreError as error:
                loaded.error = error
                # The request is cut at its first bad block, so there is no use in reading on.
                rest = {index for missing in job.reads[at:] for index in missing.wanted if index is not None}
                loaded.bad_blocks = {job.block_ids[index] for index in rest}
                break
        return loaded

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
