"""A block pool that only counts references, for tests of core/ without vLLM."""

from collections.abc import Iterable, Sequence


class FakePool:
    """Blocks are integers. It hands out free ones and notes how often each is referenced."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks

    def take(self, count: int) -> list[int]:
        """``count`` free blocks, each referenced once."""
        blocks = [block for block, count_ in enumerate(self.references) if count_ == 0][:count]
        assert len(blocks) == count, "the test asks for more blocks than there are"
        self.touch(blocks)
        return blocks

    def touch(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.references[block] += 1

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        for block in ordered_blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} is freed too often"

    @property
    def num_free(self) -> int:
        return self.references.count(0)
