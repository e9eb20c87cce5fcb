"""A block pool that only counts references, for tests of core/ without vLLM."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class FakeBlock:
    ref_cnt: int = 0


class FakeBlockPool:
    """Hands out free blocks and notes how often each is referenced."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FakeBlock() for _ in range(num_blocks)]

    def take(self, count: int) -> list[FakeBlock]:
        """``count`` free blocks, each referenced once."""
        blocks = [block for block in self.blocks if block.ref_cnt == 0][:count]
        assert len(blocks) == count, "the test asks for more blocks than there are"
        self.touch(blocks)
        return blocks

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "a block is freed too often"

    @property
    def num_free(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)
