"""KV tensors as vLLM and its attention backends make them, each element with a value of its own."""

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from userkv.store.backend import Region

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 7, 3, 8, 10
"""Of the tensors below; ``TOKENS`` per block, ``CONTENT`` numbers per token and head (K and V)."""


@dataclass
class KV:
    """The tensors of an engine.

    Attributes:
        tensors: by layer, as vLLM gives them to a connector.
        pieces: contiguous pieces of a block and layer.
        split: rows of a tensor that make up a block of the engine.
        axis: of the blocks.

    """

    tensors: dict[str, torch.Tensor]
    pieces: int = 1
    split: int = 1
    axis: int = 0
    _layers: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._layers = [tensor.movedim(self.axis, 0) for tensor in self.tensors.values()]

    def block(self, layer: int, block: int) -> torch.Tensor:
        """All that a layer keeps of a block: a view."""
        return self._layers[layer][block * self.split : (block + 1) * self.split]

    def nbytes(self, layer: int) -> int:
        """Bytes of a block in a layer."""
        return self.block(layer, 0).numel() * self.block(layer, 0).element_size()


def contents(regions: Iterable[Region]) -> bytes:
    """The bytes of some regions, one after the other."""
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in regions)


def numbers(shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A contiguous tensor whose elements all differ."""
    return torch.arange(start, start + math.prod(shape), dtype=torch.int32).reshape(shape)


def in_order(order: str, blocks: int = BLOCKS, heads: int = HEADS, layers: int = LAYERS) -> KV:
    """vLLM's ``KVCacheLayout``: logically [layer, block, head, token, content], physically in this order."""
    sizes = dict(zip("LBHNC", (layers, blocks, heads, TOKENS, CONTENT), strict=True))
    memory = numbers(tuple(sizes[dim] for dim in order))
    logical = memory.permute([order.index(dim) for dim in "LBHNC"])
    pieces = heads if order == "LHBNC" else 1
    return KV({f"layer.{layer}": logical[layer] for layer in range(layers)}, pieces)


def two_planes(blocks: int = BLOCKS, split: int = 1) -> KV:
    """[K or V, block, token, head, content]: K and V of a layer far apart."""
    shape = (2, blocks * split, TOKENS // split, HEADS, CONTENT // 2)
    size = math.prod(shape)
    return KV({f"layer.{layer}": numbers(shape, layer * size) for layer in range(LAYERS)}, 2, split, axis=1)


def kernel_blocks(blocks: int = BLOCKS, split: int = 4, heads: int = HEADS) -> KV:
    """A kernel with smaller blocks than the engine's: [block, head, token, content], with several rows per block."""
    shape = (blocks * split, heads, TOKENS // split, CONTENT)
    size = math.prod(shape)
    return KV({f"layer.{layer}": numbers(shape, layer * size) for layer in range(LAYERS)}, 1, split)


def k_beside_v(blocks: int = BLOCKS) -> KV:
    """[block, K or V, token, head, content]."""
    shape = (blocks, 2, TOKENS, HEADS, CONTENT // 2)
    size = math.prod(shape)
    return KV({f"layer.{layer}": numbers(shape, layer * size) for layer in range(LAYERS)})


def padded(blocks: int = BLOCKS) -> KV:
    """Blocks with a gap behind each."""
    shape = (blocks, HEADS + 1, TOKENS, CONTENT)
    size = math.prod(shape)
    return KV({f"layer.{layer}": numbers(shape, layer * size)[:, :HEADS] for layer in range(LAYERS)})


def different_layers(blocks: int = BLOCKS) -> KV:
    """Layers of different sizes and types."""
    return KV(
        {
            "layer.0": numbers((blocks, HEADS, TOKENS, CONTENT)),
            "layer.1": numbers((blocks, 1, TOKENS, CONTENT), 7000).to(torch.int16),
        }
    )


KINDS: dict[str, Callable[[int], KV]] = {
    "LBHNC": lambda blocks: in_order("LBHNC", blocks),
    "LBNHC": lambda blocks: in_order("LBNHC", blocks),
    "LHBNC": lambda blocks: in_order("LHBNC", blocks),
    "BLHNC": lambda blocks: in_order("BLHNC", blocks),
    "BLNHC": lambda blocks: in_order("BLNHC", blocks),
    "two planes": two_planes,
    "K beside V": k_beside_v,
    "kernel blocks": kernel_blocks,
    "kernel blocks in two planes": lambda blocks: two_planes(blocks, 2),
    "padded": padded,
    "different layers": different_layers,
}
