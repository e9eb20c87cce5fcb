"""Saves over a pool that answers when the test says so."""

from tests.support.fake_pool_client import FakePoolClient, NumberedBlockPool
from tests.support.records import BLOCK
from userkv.core.request import UserKey
from userkv.core.tokens import as_tokens
from userkv.engine.pool.scheduler.pool_client import NOT_IN_POOL, PoolLookupResult
from userkv.engine.pool.scheduler.save import History, Save
from userkv.engine.pool.scheduler.saves import PoolSaves, SaveSettings
from userkv.engine.pool.wire.messages import SaveJob


class SavesBench:
    """Saves over a pool that answers when the test says so."""

    def __init__(self, ranks: int = 2, max_saves: int = 3, ttl_seconds: float = 0, max_held_blocks: int = 60) -> None:
        self.blocks = NumberedBlockPool(60)
        self.pool = FakePoolClient(ranks)
        self._ended: list[tuple[UserKey, bool]] = []
        self.saves = PoolSaves(
            self.pool,  # type: ignore[arg-type]
            self.blocks,
            SaveSettings(BLOCK, 2, max_saves, max_held_blocks, ttl_seconds, "writer"),
        )
        self.owned: list[list[object]] = []

    @property
    def ended(self) -> list[tuple[UserKey, bool]]:
        """How each save ended so far."""
        self._ended += self.saves.take_ended()
        return self._ended

    def history(self, tokens: list[int], user: str = "u", namespace: str = "n") -> History:
        """A history; the test references its blocks for now."""
        blocks = self.blocks.take(-(-len(tokens) // BLOCK))
        self.owned.append(blocks)
        return History(UserKey(user), user, namespace, as_tokens(tokens), tuple(blocks))

    def forget(self) -> None:
        """HBM evicts everything."""
        for blocks in self.owned:
            self.blocks.free_blocks(reversed(blocks))
        self.owned.clear()

    def report(self, save: Save, *oks: bool, dropped: bool = False) -> None:
        for ok in oks:
            self.saves.report_write(save.job_id, ok, dropped)

    def begin(
        self, tokens: int = 10, answer: PoolLookupResult | None = NOT_IN_POOL, during_forward: bool = False
    ) -> Save:
        save = self.saves.start(self.history(list(range(tokens))), answer, during_forward=during_forward)
        assert save is not None
        return save

    def ship(self) -> SaveJob:
        (job,) = self.saves.ship()
        return job

    def assert_over(self, *oks: bool) -> None:
        """All saves have ended like this, and nothing is held any more."""
        self.saves.release()
        self.forget()
        assert [ok for _, ok in self.ended] == list(oks)
        assert len(self.saves) == 0
        assert not self.saves.has_unshipped()
        assert not self.saves.frees_blocks_soon()
        assert self.saves.held_blocks() == []
        assert self.blocks.num_free == len(self.blocks.blocks)
