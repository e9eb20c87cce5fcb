"""Brings histories that are in HBM into the pool, and checks that they stay there."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from userkv.cache.block_table import UserBlockTable, UserEntry
from userkv.core.request import UserKey
from userkv.engine.pool.scheduler.pool_client import PoolLookupResult
from userkv.engine.pool.scheduler.save import History, Save
from userkv.engine.pool.scheduler.saves import PoolSaves
from userkv.engine.pool.wire.messages import SaveJob

RECHECK_SECONDS = 60.0
"""How often the pool is asked whether it still has a user whose requests all hit HBM."""

RETRY_SECONDS = 5.0
"""How soon a save that failed may be tried again."""


@dataclass(slots=True, eq=False)
class _Checked:
    """When a user's entry in HBM was last compared with the pool."""

    entry: UserEntry
    next_check: float
    saved_at: float = 0.0


class HistorySaver:
    """Decides when which history is saved; one save per user at a time. Scheduler thread only.

    A save may fail or be dropped, and the pool may evict a user whose requests all hit HBM. So the pool is asked again
    from time to time when such a user comes back, and what it lacks is saved.

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

    def save(
        self, history: History, entry: UserEntry, answer: PoolLookupResult | None, *, in_pool: bool = False
    ) -> None:
        """Save a history that has entered HBM as ``entry``; after the user's present save, if there is one.

        Args:
            history: what to save.
            entry: its entry in the table.
            answer: what the pool has said of the user, if it is to be trusted.
            in_pool: by that answer, the pool has all of it.

        """
        self._take_ended()
        checked = self._note_entry(history.key, entry)
        if self._saves.is_saving(history.uid, history.namespace):
            self._waiting[history.key] = history
        elif in_pool:
            checked.next_check = self._clock() + RECHECK_SECONDS
            self._saves.count_unneeded()
        else:
            self._saves.start(history, answer)

    def save_during_forward(self, history: History, answer: PoolLookupResult) -> Save | None:
        """Save a history while the next step computes its end; see :meth:`confirm`.

        Returns:
            The save; ``None`` if it is dropped, or if one of this user is under way already.

        """
        return self._saves.start(history, answer, during_forward=True)

    def confirm(self, save: Save, entry: UserEntry) -> None:
        """The step has computed what it should: what ``save`` writes is the history of this entry."""
        self._note_entry(save.history.key, entry)
        self._saves.confirm(save)

    def cancel(self, save: Save) -> None:
        """The step has not computed what it should: what ``save`` writes never becomes visible."""
        self._saves.cancel(save)

    def tokens_saved_since(self, key: UserKey, asked_at: float) -> int:
        """The tokens of the user's entry that was saved, if a save has ended since ``asked_at``; otherwise 0."""
        self._take_ended()
        checked = self._checked.get(key)
        return 0 if checked is None or checked.saved_at < asked_at else checked.entry.num_tokens

    def recheck(self, history: History, entry: UserEntry) -> None:
        """A request has hit all of its history in HBM: if it is time, ask whether the pool has it too."""
        checked = self._checked.get(history.key)
        if checked is None or checked.entry is not entry or self._clock() >= checked.next_check:
            self.save(history, entry, None)

    def take_jobs(self) -> list[SaveJob]:
        """The jobs to send with this step. Starts what has waited for a save to end, and releases blocks."""
        self._take_ended()
        jobs = self._saves.ship()
        self._saves.release()
        return jobs

    def needs_step(self) -> bool:
        """Whether saves wait for :meth:`take_jobs`, although no request may need a step."""
        return bool(self._waiting) or self._saves.has_unshipped()

    def frees_blocks_soon(self) -> bool:
        """Whether saves will release blocks soon, whatever the requests do."""
        return self._saves.frees_blocks_soon()

    def reset(self) -> None:
        """All users were forgotten: cancel all saves, and release their blocks at once."""
        self._checked.clear()
        self._waiting.clear()
        self._saves.cancel_all()

    def take_counts(self) -> dict[str, int]:
        """How saves ended since the last call, by the names of the connector's counters."""
        return self._saves.take_counts()

    def _note_entry(self, key: UserKey, entry: UserEntry) -> _Checked:
        before = self._checked.pop(key, None)
        checked = _Checked(entry, self._clock() + RETRY_SECONDS, before.saved_at if before is not None else 0.0)
        self._checked[key] = checked
        while len(self._checked) > 2 * len(self._table) + 1000:
            self._checked.popitem(last=False)
        return checked

    def _take_ended(self) -> None:
        for key, ok in self._saves.take_ended():
            checked = self._checked.get(key)
            if checked is not None:
                checked.saved_at = self._clock()
                checked.next_check = checked.saved_at + (RECHECK_SECONDS if ok else RETRY_SECONDS)
            history = self._waiting.get(key)
            if history is None or self._saves.is_saving(history.uid, history.namespace):
                continue  # The save that ended may have been one of other weights.
            del self._waiting[key]
            entry = self._table.get(key)
            # If the entry left HBM or was replaced meanwhile, its blocks may hold other KV.
            if entry is not None and entry.blocks == history.blocks:
                self._note_entry(key, entry)
                self._saves.start(history, None)
