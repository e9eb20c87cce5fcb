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
        kinds = [_describe(t, _block_dim(name, t, num_blocks), num_blocks) for name, t in kv_caches.items()]
        kinds = [f"{kind}/{len(layer)}x{layer[0].nbytes}" for kind, layer in zip(kinds, planes, strict=True)]
        return cls(
            layer_names=tuple(kv_caches),
            num_blocks=num_blocks,
            block_nbytes=sum(plane.nbytes for layer in planes for plane in layer),
            planes=planes,
            description=f"{len(planes)} layers of {sorted(set(kinds))}",
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
                    elif joined or count == 1:
                        regions.append(Region(base + first * stride, count * nbytes))
                    else:
                        regions += [Region(base + (first + i) * stride, nbytes) for i in range(count)]
        return regions

    def spans(self) -> list[Region]:
        """All KV memory: what a transport has to register."""
        spans = sorted(
            Region(plane.base, (self.num_blocks - 1) * plane.stride + plane.nbytes)
            for layer in self.planes
            for plane in layer
        )
        merged: list[Region] = []
        for address, nbytes in spans:
            if merged and address < sum(merged[-1]):
                start = merged[-1].address
                merged[-1] = Region(start, max(sum(merged[-1]), address + nbytes) - start)
            else:
                merged.append(Region(address, nbytes))
        return merged


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
    size, at = tensor.element_size(), _block_dim(name, tensor, num_blocks)
    # vLLM may split its blocks into smaller ones for a kernel.
    split, stride = tensor.shape[at] // num_blocks, tensor.stride(at) * size
    dims = [(tensor.stride(i) * size, tensor.shape[i]) for i in range(tensor.dim()) if i != at and tensor.shape[i] > 1]
    if split > 1:
        dims.append((stride, split))
    nbytes, offsets = size, [0]
    for distance, extent in sorted(dims):
        if distance == nbytes and len(offsets) == 1:
            nbytes *= extent
        elif distance >= stride:
            offsets = [offset + i * distance for i in range(extent) for offset in offsets]
        else:
            raise UnsupportedEngineError(f"a KV block of {name} is scattered (strides {tensor.stride()})")
    return tuple(_Plane(tensor.data_ptr() + offset, stride * split, nbytes) for offset in sorted(offsets))


def _block_dim(name: str, tensor: torch.Tensor, num_blocks: int) -> int:
    """Blocks come first in vLLM's tensors, or after the pair of K and V."""
    for dim in range(min(2, tensor.dim())):
        if tensor.shape[dim] % num_blocks == 0 and not (dim == 0 and tensor.shape[0] == 2 != num_blocks):
            return dim
    raise UnsupportedEngineError(f"the KV tensor of {name} has no dimension of {num_blocks} blocks")


def _describe(tensor: torch.Tensor, at: int, num_blocks: int) -> str:
    """What decides the order of a block's bytes, whatever the number of blocks."""
    order = sorted((i for i in range(tensor.dim()) if i != at), key=lambda i: -tensor.stride(i))
    return f"{tensor.dtype}:{tensor.shape[at] // num_blocks}:{[(i, tensor.shape[i]) for i in order]}"
