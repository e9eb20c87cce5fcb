"""KV blocks that hold nothing."""

from collections.abc import Iterable, Sequence


class SimBlock:
    """A block, by how many owners it is referenced."""

    __slots__ = ("ref_cnt",)

    def __init__(self) -> None:
        self.ref_cnt = 0


class SimBlockPool:
    """A block pool that only counts; see :class:`userkv.cache.block_table.BlockPool`.

    Args:
        num_blocks: blocks there are.

    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = num_blocks

    def allocate(self, count: int) -> list[SimBlock]:
        """New blocks, each with one reference; the caller has looked at :attr:`num_free`."""
        blocks = [SimBlock() for _ in range(count)]
        self.touch(blocks)
        return blocks

    def touch(self, blocks: Sequence[SimBlock]) -> None:
        """Add one reference to each block."""
        for block in blocks:
            self.num_free -= block.ref_cnt == 0
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[SimBlock]) -> None:
        """Drop one reference of each block."""
        for block in ordered_blocks:
            block.ref_cnt -= 1
            self.num_free += block.ref_cnt == 0
