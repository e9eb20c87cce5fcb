"""Single flight: when several requests of one user miss at once, one computes the history and the others wait."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from userkv.cache.stats import UserCacheStats
from userkv.core.tokens import TokenArray, common_prefix

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Wait:
    leader: str
    worthwhile: bool
    since: float | None = None
    gave_up: bool = False


class SingleFlight(Generic[K]):
    """Which requests compute a user's history (the leaders), and which wait for one of them.

    A leader holds blocks and runs, so it never waits for a waiter, and no request waits for one that does not run:
    there is no deadlock. Not thread-safe: the scheduler thread owns it.

    Args:
        max_wait: seconds that a request waits in all before it computes by itself; 0 = no request waits.
        min_gain: tokens that waiting must save at least. It must also save half of what the leader has to compute,
            so that no request waits for a long history to share its first words.
        clock: seconds, monotonic.
        stats: where waits and time-outs are counted.

    """

    def __init__(self, max_wait: float, min_gain: int, clock: Callable[[], float], stats: UserCacheStats) -> None:
        self._max_wait = max_wait
        self._min_gain = min_gain
        self._clock = clock
        self._stats = stats
        self._histories: dict[K, dict[str, TokenArray]] = {}
        self._leading: dict[str, K] = {}
        self._waiting: dict[str, _Wait] = {}

    def start_leading(self, request_id: str, user: K, history: TokenArray) -> None:
        """The request runs and will put ``history`` into the table."""
        self._histories.setdefault(user, {})[request_id] = history
        self._leading[request_id] = user
        self._waiting.pop(request_id, None)

    def stop_leading(self, request_id: str) -> bool:
        """The request leads no more: its history is in the table, or never will be. Returns whether it did lead."""
        user = self._leading.pop(request_id, None)
        if user is None:
            return False
        histories = self._histories[user]
        del histories[request_id]
        if not histories:
            del self._histories[user]
        return True

    def remove(self, request_id: str) -> bool:
        """The request is over, whether it led, waited or neither. Returns whether it led."""
        self._waiting.pop(request_id, None)
        return self.stop_leading(request_id)

    def leaders(self) -> list[str]:
        """All requests that lead, oldest first."""
        return list(self._leading)

    def must_wait(self, request_id: str, user: K, history: TokenArray, held: Callable[[], int]) -> bool:
        """Whether the request, which does not run yet, should go on waiting.

        Args:
            request_id: the request.
            user: the user of the history.
            history: the request's history.
            held: how many tokens of it the table holds now; asked once per leader.

        """
        histories = self._histories.get(user)
        if not histories or self._max_wait <= 0:
            return False
        leader = next(iter(histories))
        wait = self._waiting.get(request_id)
        if wait is None or wait.leader != leader:
            already = held()
            gain = common_prefix(histories[leader], history) - already
            worthwhile = gain >= max(self._min_gain, (len(histories[leader]) - already) / 2)
            if wait is None:
                wait = self._waiting[request_id] = _Wait(leader, worthwhile)
            wait.leader, wait.worthwhile = leader, worthwhile
        if wait.gave_up or not wait.worthwhile:
            return False
        if wait.since is None:
            wait.since = self._clock()
            self._stats.single_flight_waits += 1
        elif self._clock() - wait.since > self._max_wait:
            wait.gave_up = True
            self._stats.single_flight_timeouts += 1
            return False
        return True
