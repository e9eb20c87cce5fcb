"""The user cache's figures on their way through vLLM's statistics."""

from vllm.v1.metrics.stats import SchedulerStats

from userkv.cache.settings import CacheSettings
from userkv.cache.user_cache import UserCache
from userkv.engine.metrics import Sizes, attach_snapshot, detach_snapshot


class NoBlocks:
    """A block pool for a cache that stays empty."""

    def touch(self, blocks: object) -> None:
        raise AssertionError("nothing is kept here")

    free_blocks = touch


def sent(users: UserCache, known: Sizes) -> tuple[dict[str, int] | None, Sizes]:
    """What arrives, and the sizes that are known from then on."""
    stats = SchedulerStats(kv_connector_stats={"theirs": 1})
    sizes = attach_snapshot(stats, users, known)
    snapshot = detach_snapshot(stats)
    assert stats.kv_connector_stats == {"theirs": 1}
    return snapshot, sizes


def test_only_news_are_sent() -> None:
    users = UserCache(4, 10, NoBlocks(), CacheSettings())
    first, sizes = sent(users, (-1, -1, -1))
    assert first is not None
    assert set(first.values()) == {0}
    assert sent(users, sizes) == (None, sizes)
    users.stats.user_hits += 2
    counted, sizes = sent(users, sizes)
    assert counted is not None
    assert counted["user_hits"] == 2
    assert sent(users, sizes) == (None, sizes)
    grown, sizes = sent(users, (sizes[0] + 1, *sizes[1:]))
    assert grown is not None
    assert grown["users"] == len(users.table) == 0
