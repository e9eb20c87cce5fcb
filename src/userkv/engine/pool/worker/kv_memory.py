"""How transfer threads reach KV memory: directly on a CPU, through pinned staging memory and events on CUDA and NPU.

:class:`HostKVMemory` is tested here. :class:`StagedKVMemory` is written against the documented stream and event API
that ``torch.cuda`` and ``torch.npu`` (torch_npu) share, and was **not run on a device**: this project's machines have
none. Only its staging, gathering and scattering are tested, with tensors on the CPU.
"""

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from userkv.engine.pool.worker.kv_layout import NOWHERE
from userkv.store.backend import Region


class HostBuffer:
    """Plain host memory with an address."""

    def __init__(self, nbytes: int) -> None:
        self._memory = (ctypes.c_char * nbytes)()
        self.address = ctypes.addressof(self._memory)
        self.nbytes = nbytes


class KVMemory(ABC):
    """Access to the engine's KV memory from threads that do not compute. Thread-safe."""

    @abstractmethod
    def mark(self) -> Any:
        """A mark in the computation, on the thread that computes: what was enqueued so far is before it."""

    @abstractmethod
    def read(
        self, regions: Sequence[Region], unstable: Collection[Region] = (), after: Any = None
    ) -> AbstractContextManager[Sequence[Region]]:
        """Host memory with the bytes of ``regions``, of the same total size, which does not change until the end.

        Args:
            regions: pieces of KV memory.
            unstable: those of them that a running request may write to meanwhile, in bytes that do not matter.
            after: a :meth:`mark`; the bytes are those after everything before it has run. ``None``: everything has.

        """

    @abstractmethod
    def write(self, regions: Sequence[Region]) -> AbstractContextManager[Sequence[Region]]:
        """Host memory to fill in; when the context ends without an error, its bytes are in ``regions``.

        Pieces at address ``NOWHERE`` may occur, for bytes that nobody wants.
        """

    @abstractmethod
    def host_spans(self, spans: Sequence[Region]) -> Sequence[Region]:
        """The memory that transports will read and write, for them to register; ``spans`` is the KV memory."""


class HostKVMemory(KVMemory):
    """KV in host memory: no staging, and what a step wrote is there when the step's code has returned.

    Args:
        largest_piece: bytes of the largest piece that :meth:`write` is given for ``NOWHERE``.
        writers: threads that call :meth:`write`.

    """

    def __init__(self, largest_piece: int, writers: int) -> None:
        # One per thread: backends read back what they have written, to verify it.
        self._scratches = [HostBuffer(largest_piece) for _ in range(writers)]
        self._free = list(self._scratches)
        self._local = threading.local()

    def mark(self) -> None:
        return None

    @contextlib.contextmanager
    def read(
        self, regions: Sequence[Region], unstable: Collection[Region] = (), after: Any = None
    ) -> Iterator[Sequence[Region]]:
        if not unstable:
            yield regions
            return
        needed = sum(region.nbytes for region in unstable)
        copy: HostBuffer | None = getattr(self._local, "copy", None)
        if copy is None or copy.nbytes < needed:
            copy = self._local.copy = HostBuffer(needed)
        moved, at = {}, copy.address
        for region in unstable:
            ctypes.memmove(at, region.address, region.nbytes)
            moved[region] = Region(at, region.nbytes)
            at += region.nbytes
        yield [moved.get(region, region) for region in regions]

    @contextlib.contextmanager
    def write(self, regions: Sequence[Region]) -> Iterator[Sequence[Region]]:
        if all(address != NOWHERE for address, _ in regions):
            yield regions
            return
        if not hasattr(self._local, "scratch"):
            if not self._free:
                raise RuntimeError(
                    f"too many threads write to KV memory that was made for writers={len(self._scratches)}"
                )
            self._local.scratch = self._free.pop()
        scratch = self._local.scratch.address
        yield [
            Region(scratch, nbytes) if address == NOWHERE else Region(address, nbytes) for address, nbytes in regions
        ]

    def host_spans(self, spans: Sequence[Region]) -> Sequence[Region]:
        return [*spans, *(Region(scratch.address, scratch.nbytes) for scratch in self._scratches)]


class StagedKVMemory(KVMemory):
    """KV in device memory, copied through staging memory by a stream of its own.

    Args:
        kv_caches: vLLM's KV tensors.
        module: ``torch.cuda`` or ``torch.npu``; ``None`` for tests with host tensors.

    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], module: Any) -> None:
        self._module = module
        self._bytes: list[tuple[int, torch.Tensor]] = []
        for tensor in kv_caches.values():
            storage = tensor.untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._bytes.append((storage.data_ptr(), flat))
        self._local = threading.local()

    def mark(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    @contextlib.contextmanager
    def read(
        self, regions: Sequence[Region], unstable: Collection[Region] = (), after: Any = None
    ) -> Iterator[Sequence[Region]]:
        staging = self._staging(sum(region.nbytes for region in regions))
        with self._stream(after):
            for host, device in self._pairs(staging, regions):
                host.copy_(device, non_blocking=True)
        yield [Region(staging.data_ptr(), staging.numel())]

    @contextlib.contextmanager
    def write(self, regions: Sequence[Region]) -> Iterator[Sequence[Region]]:
        staging = self._staging(sum(region.nbytes for region in regions))
        yield [Region(staging.data_ptr(), staging.numel())]
        with self._stream(None):
            for host, device in self._pairs(staging, regions):
                device.copy_(host, non_blocking=True)

    def host_spans(self, spans: Sequence[Region]) -> Sequence[Region]:
        # Staging memory grows with need, so there is nothing to register ahead: fine for host memory and TCP.
        return ()

    @contextlib.contextmanager
    def _stream(self, after: Any) -> Iterator[None]:
        """Copies issued inside run on this thread's stream, and are done when the context ends."""
        if self._module is None:
            yield
            return
        if not hasattr(self._local, "stream"):
            self._local.stream = self._module.Stream()
        stream = self._local.stream
        if after is not None:
            stream.wait_event(after)
        with self._module.stream(stream):
            yield
        stream.synchronize()

    def _staging(self, nbytes: int) -> torch.Tensor:
        held: torch.Tensor | None = getattr(self._local, "staging", None)
        if held is None or held.numel() < nbytes:
            held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._module is not None)
            self._local.staging = held
        return held[:nbytes]

    def _pairs(self, staging: torch.Tensor, regions: Sequence[Region]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        at = 0
        for address, nbytes in regions:
            if address != NOWHERE:
                yield staging[at : at + nbytes], self._device_bytes(address, nbytes)
            at += nbytes

    def _device_bytes(self, address: int, nbytes: int) -> torch.Tensor:
        for base, flat in self._bytes:
            if base <= address and address + nbytes <= base + flat.numel():
                return flat[address - base : address - base + nbytes]
        raise ValueError(f"{nbytes} bytes at {address:#x} are not KV memory")


def kv_memory(kv_caches: Mapping[str, torch.Tensor], largest_piece: int, writers: int) -> KVMemory:
    """The right access for the device that holds the KV, for so many threads that write."""
    device = next(iter(kv_caches.values())).device.type
    return (
        HostKVMemory(largest_piece, writers) if device == "cpu" else StagedKVMemory(kv_caches, getattr(torch, device))
    )
