"""A pool that answers as the test says, and a block pool with numbered blocks, for the connector's scheduler."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.fake_block_pool import FakeBlock, FakeBlockPool
from userkv.engine.pool.scheduler.pool_client import PoolCommitResult, PoolLookupResult
from userkv.records.record import Extent, UserRecord

COMMITTED = PoolCommitResult(committed=True)
REFUSED = PoolCommitResult(committed=False, refused=True)
COMMIT_UNANSWERED = PoolCommitResult(committed=False)


@dataclass(eq=False)
class NumberedBlock(FakeBlock):
    """A block with vLLM's number."""

    block_id: int = -1


class NumberedBlockPool(FakeBlockPool):
    """Blocks with numbers from 100 on, so that a number taken for an index fails."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(0)
        self.blocks = [NumberedBlock(0, 100 + number) for number in range(num_blocks)]  # type: ignore[misc]


@dataclass(frozen=True)
class AskedLookup:
    """A look-up that waits for its answer."""

    uid: str
    namespace: str
    answer: Callable[[PoolLookupResult], None]
    is_new_request: bool


@dataclass(frozen=True)
class AskedCommit:
    """A commit that waits for its answer."""

    uid: str
    namespace: str
    record: UserRecord
    base_generation: int
    answer: Callable[[PoolCommitResult], None]


class FakePoolClient:
    """In place of ``PoolClient``: notes what is asked; the test answers, when and from which thread it wants."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.lookups: list[AskedLookup] = []
        self.commits: list[AskedCommit] = []
        self.removed: list[Extent] = []

    def lookup(
        self,
        uid: str,
        namespace: str,
        done: Callable[[PoolLookupResult], None],
        *,
        is_new_request: bool = False,
        background: bool = False,
    ) -> None:
        self.lookups.append(AskedLookup(uid, namespace, done, is_new_request))

    def commit(
        self,
        uid: str,
        namespace: str,
        record: UserRecord,
        base_generation: int,
        done: Callable[[PoolCommitResult], None],
    ) -> None:
        self.commits.append(AskedCommit(uid, namespace, record, base_generation, done))

    def remove(self, uid: str, namespace: str, extents: Sequence[Extent]) -> None:
        self.removed += extents

    def close(self) -> None:
        pass
