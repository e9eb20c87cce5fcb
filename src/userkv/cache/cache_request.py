"""A request of a user, as the cache sees it, and what the cache remembers of it."""

from dataclasses import dataclass, field

from userkv.cache.block_table import UserEntry
from userkv.cache.hit import count_held
from userkv.core.request import UserKey, UserRequest
from userkv.core.tokens import TokenArray


@dataclass(slots=True, eq=False)
class CacheRequest:
    """A user's request; made once, when the engine receives the request.

    Attributes:
        key: the user that the KV belongs to.
        request: the validated contract.
        history: the first ``history_len`` prompt tokens.
        counted: the request is in the statistics already, and the eviction policy has counted it.
        tiers: history tokens that it did not have to compute when it started first, by where they came from (``hbm``,
            ``dram``, ``ssd``).

    """

    key: UserKey
    request: UserRequest
    history: TokenArray
    counted: bool = False
    tiers: dict[str, int] = field(default_factory=dict)
    _compared: tuple[UserEntry | None, int] = (None, 0)

    def held_tokens(self, entry: UserEntry | None) -> int:
        """How many tokens of the history an entry of the table holds; compared with each entry once."""
        if entry is not self._compared[0]:
            self._compared = entry, count_held(entry, self.history)
        return self._compared[1]


@dataclass(frozen=True, slots=True, eq=False)
class FoundHit:
    """The answer of the last look-up, remembered until the request starts.

    Attributes:
        entry: the user's entry at that time.
        held: how many tokens of the history it holds.
        hit: how many of them the request can take.

    """

    entry: UserEntry | None = None
    held: int = 0
    hit: int = 0


NOT_FOUND = FoundHit()


@dataclass(frozen=True, slots=True, eq=False)
class RunningRequest:
    """A request that holds blocks, and how many tokens it did not have to compute when it got them."""

    request: CacheRequest
    start_tokens: int
