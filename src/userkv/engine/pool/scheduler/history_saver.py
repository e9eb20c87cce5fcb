"""Sees to it that histories in HBM get into the pool, and stay there."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from userkv.cache.block_table import UserBlockTable, UserEntry
from userkv.core.request import UserKey
from userkv.engine.pool.scheduler.pool_client import PoolLookupResult
from userkv.engine.pool.scheduler.saves import History, PoolSaves, Save

RECHECK_SECONDS = 60.0
"""How often the pool is asked whether it still has a user whose requests all hit HBM."""

RETRY_SECONDS = 5.0
"""How soon a save that failed may be tried again."""


@dataclass(slots=True, eq=False)
class _Checked:
    """When a user's entry in HBM was last held against the pool."""

    entry: UserEntry
    next_check: float
    saved_at: float = 0.0


class HistorySaver:
    """Starts saves, one per user at a time. Scheduler thread only, but for :meth:`save_ended`.

    A save may fail or be dropped, and the pool may forget a user whose requests all hit HBM: so the pool is asked again
    now and then when such a user comes back, and what it lacks is saved.

    Args:
        saves: the saves under way.
        table: the users in HBM.
        clock: seconds, monotonic.

    """

    def __init__(
        self, saves: PoolSaves, table: UserBlockTable[UserKey], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._saves = saves
        self._table = table
        self._clock = clock
        self._checked: OrderedDict[UserKey, _Checked] = OrderedDict()
        self._waiting: dict[UserKey, History] = {}
        self._ended: deque[tuple[UserKey, bool]] = deque()

    def save(self, history: History, entry: UserEntry, answer: PoolLookupResult | None, *, held: bool = False) -> None:
        """Save a history that has entered HBM as ``entry``; after the user's present save, if there is one.

        Args:
            history: what to save.
            entry: its entry in the table.
            answer: what the pool has said of the user, if it is to be trusted.
            held: by that answer, the pool has all of it.

        """
        self._note_ended()
        checked = self._note(history.key, entry)
        if self._saves.is_saving(history.uid, history.namespace):
            self._waiting[history.key] = history
        elif held:
            checked.next_check = self._clock() + RECHECK_SECONDS
            self._saves.unneeded()
        else:
            self._saves.start(history, answer)

    def trusts(self, key: UserKey, asked_at: float) -> bool:
        """Whether an answer to a question of ``asked_at`` still holds: no save of this user has ended since."""
        return self.saved_since(key, asked_at) == 0

    def saved_since(self, key: UserKey, asked_at: float) -> int:
        """The tokens of the user's entry that was saved, if a save has ended since ``asked_at``; otherwise 0."""
        self._note_ended()
        checked = self._checked.get(key)
        return 0 if checked is None or checked.saved_at < asked_at else checked.entry.num_tokens

    def written(self, key: UserKey, entry: UserEntry) -> None:
        """A save that ran beside the forward pass has become this entry."""
        self._note(key, entry)

    def check(self, history: History, entry: UserEntry) -> None:
        """A request has hit all of its history in HBM: see, now and then, whether the pool has it too."""
        checked = self._checked.get(history.key)
        if checked is None or checked.entry is not entry or self._clock() >= checked.next_check:
            self.save(history, entry, None)

    def step(self) -> None:
        """Start what has waited for a save to end. Once per step."""
        self._note_ended()

    def needs_step(self) -> bool:
        """Whether something waits for :meth:`step`."""
        return bool(self._waiting)

    def forget(self) -> None:
        """All users were forgotten."""
        self._checked.clear()
        self._waiting.clear()

    def save_ended(self, save: Save, ok: bool) -> None:
        """A save has ended. Any thread."""
        self._ended.append((save.history.key, ok))

    def _note(self, key: UserKey, entry: UserEntry) -> _Checked:
        before = self._checked.pop(key, None)
        checked = _Checked(entry, self._clock() + RETRY_SECONDS, before.saved_at if before is not None else 0.0)
        self._checked[key] = checked
        while len(self._checked) > 2 * len(self._table) + 1000:
            self._checked.popitem(last=False)
        return checked

    def _note_ended(self) -> None:
        while self._ended:
            key, ok = self._ended.popleft()
            checked = self._checked.get(key)
            if checked is not None:
                checked.saved_at = self._clock()
                checked.next_check = checked.saved_at + (RECHECK_SECONDS if ok else RETRY_SECONDS)
            history = self._waiting.get(key)
            if history is None or self._saves.is_saving(history.uid, history.namespace):
                continue  # The save that ended may have been one of other weights.
            del self._waiting[key]
            entry = self._table.get(key)
            # Only if it has not left HBM, nor been replaced, meanwhile: its blocks are somebody else's then.
            if entry is not None and entry.blocks == history.blocks:
                self._note(key, entry)
                self._saves.start(history, None)
