"""Where the KV of a block lies in the engine's memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from userkv.core.errors import UnsupportedEngineError
from userkv.store.backend import Region

NOWHERE = 0
"""Address of bytes that nobody wants."""


@dataclass(frozen=True, slots=True)
class _Plane:
    """A row of blocks at equal distances, each one contiguous piece."""

    base: int
    stride: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Addresses of KV blocks, layer by layer.

    A block's bytes are opaque: on CPUs they are packed for the instruction set. Some attention backends keep K and V of
    a layer apart; such a layer has two planes. The bytes of an extent are ordered by layer, then plane, then block.

    Attributes:
        layer_names: vLLM's names, in the order of the forward pass.
        num_blocks: KV blocks of the engine.
        block_nbytes: bytes of a block over all layers.

    """

    layer_names: tuple[str, ...]
    num_blocks: int
    block_nbytes: int
    planes: tuple[tuple[_Plane, ...], ...]
    description: str

    @classmethod
    def of(cls, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> "KVLayout":
        """The layout of vLLM's KV tensors.

        Raises:
            UnsupportedEngineError: a block of a layer is not made of contiguous pieces.

        """
        planes = tuple(_planes(name, tensor, num_blocks) for name, tensor in kv_caches.items())
        shapes = [f"{tuple(t.shape)}/{t.stride()}/{t.dtype}".replace(str(num_blocks), "N") for t in kv_caches.values()]
        return cls(
            layer_names=tuple(kv_caches),
            num_blocks=num_blocks,
            block_nbytes=sum(plane.nbytes for layer in planes for plane in layer),
            planes=planes,
            description=f"{len(planes)} layers, {sorted(set(shapes))}",
        )

    @property
    def largest_piece(self) -> int:
        """Bytes of the largest contiguous piece of a block."""
        return max(plane.nbytes for layer in self.planes for plane in layer)

    def regions(self, block_ids: Sequence[int | None], layers: Sequence[int], apart: int = -1) -> list[Region]:
        """The pieces of memory that hold some blocks; neighbours are joined.

        Args:
            block_ids: the blocks in order; ``None`` is a block whose bytes nobody wants: pieces at address ``NOWHERE``.
            layers: the layers in order.
            apart: a block that is not joined with its neighbours.

        """
        runs = _runs(block_ids, apart)
        regions = []
        for layer in layers:
            for base, stride, nbytes in ((p.base, p.stride, p.nbytes) for p in self.planes[layer]):
                joined = stride == nbytes
                for first, count in runs:
                    if first is None:
                        regions += [Region(NOWHERE, nbytes)] * count
                    elif joined:
                        regions.append(Region(base + first * stride, count * nbytes))
                    else:
                        regions += [Region(base + (first + i) * stride, nbytes) for i in range(count)]
        return regions

    def spans(self) -> list[Region]:
        """All KV memory: what a transport has to register."""
        return sorted(
            {
                Region(plane.base, (self.num_blocks - 1) * plane.stride + plane.nbytes)
                for layer in self.planes
                for plane in layer
            }
        )


def _runs(block_ids: Sequence[int | None], apart: int) -> list[tuple[int | None, int]]:
    """Consecutive block ids as (first, count)."""
    runs: list[tuple[int | None, int]] = []
    for block in block_ids:
        if runs and block != apart:
            first, count = runs[-1]
            if block is None if first is None else block == first + count and block - 1 != apart:
                runs[-1] = (first, count + 1)
                continue
        runs.append((block, 1))
    return runs


def _planes(name: str, tensor: torch.Tensor, num_blocks: int) -> tuple[_Plane, ...]:
    size = tensor.element_size()
    dims = sorted(
        ((stride * size, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1),
        reverse=True,
    )
    if num_blocks == 1:
        dims.insert(0, (tensor.numel() * size, 1))
    at = next((i for i, (_, extent) in enumerate(dims) if extent == num_blocks), None)
    if at is None:
        # vLLM may split its blocks into smaller ones for a kernel.
        at = next((i for i, (_, extent) in enumerate(dims) if extent % num_blocks == 0), None)
        if at is not None:
            stride, extent = dims[at]
            dims[at : at + 1] = [(stride * (extent // num_blocks), num_blocks), (stride, extent // num_blocks)]
    if at is None:
        raise UnsupportedEngineError(f"the KV tensor of {name} has no dimension of {num_blocks} blocks")
    nbytes = size
    for stride, extent in reversed(dims[at + 1 :]):
        if stride != nbytes:
            raise UnsupportedEngineError(f"a KV block of {name} is scattered (strides {tensor.stride()})")
        nbytes *= extent
    offsets = [0]
    for stride, extent in dims[:at]:
        offsets = [offset + i * stride for offset in offsets for i in range(extent)]
    return tuple(_Plane(tensor.data_ptr() + offset, dims[at][0], nbytes) for offset in offsets)
