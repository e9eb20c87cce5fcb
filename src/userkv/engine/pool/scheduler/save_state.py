"""The states of a save, and the only place that says which event leads from which state to which.

A save that goes well::

    LOOKING_UP -> PLANNED -> WRITING -> COMMITTING -> COMMITTED

A save that is written during the forward pass needs one event more: the confirmation that the step has computed what
it should. It may come before or after the ranks have written::

    PLANNED -> WRITING_UNCONFIRMED -> WRITING     -> COMMITTING
                                   -> UNCONFIRMED -> COMMITTING

A save that fails while ranks write waits for all of them before it ends (FAILING, DROPPING). Only then no rank writes
any more, and the extents can be removed.
"""

from enum import Enum, auto

from userkv.engine.pool.scheduler.transitions import Transitions


class SaveState(Enum):
    """Where a save stands. The last four are its outcome."""

    LOOKING_UP = "looking_up"
    """The pool has been asked what it has of the user."""
    PLANNED = "planned"
    """What to write is known; the next step ships the job."""
    WRITING = "writing"
    """The ranks write. Nothing but their reports is missing."""
    WRITING_UNCONFIRMED = "writing_unconfirmed"
    """The ranks write, and the step that computes the KV is not confirmed."""
    UNCONFIRMED = "unconfirmed"
    """All ranks have written, and the step that computes the KV is not confirmed."""
    COMMITTING = "committing"
    """Rank 0 has been asked to replace the user's record."""
    FAILING = "failing"
    """The save will not be committed; some ranks still write."""
    DROPPING = "dropping"
    """As FAILING; a rank had no room for the job in its queue."""
    COMMITTED = "committed"
    """The record names the history."""
    UNNEEDED = "unneeded"
    """The pool had the history already."""
    FAILED = "failed"
    """The pool, a rank or the step failed."""
    DROPPED = "dropped"
    """A rank had no room for the job in its queue."""

    @property
    def is_over(self) -> bool:
        """Whether this is an outcome."""
        return self in _OUTCOMES

    @property
    def waits_for_step(self) -> bool:
        """Whether the job has not been shipped with a step yet."""
        return self in (SaveState.LOOKING_UP, SaveState.PLANNED)

    @property
    def is_written_by_ranks(self) -> bool:
        """Whether ranks still have to report the job."""
        return self in (SaveState.WRITING, SaveState.WRITING_UNCONFIRMED, SaveState.FAILING, SaveState.DROPPING)

    @property
    def leaves_extents(self) -> bool:
        """Whether a save that fails in this state leaves extents in the pool that no record names."""
        return self in (SaveState.UNCONFIRMED, SaveState.FAILING, SaveState.DROPPING)


class SaveEvent(Enum):
    """What happens to a save."""

    EXTENTS_MISSING = auto()
    """The pool has answered; it lacks a part of the history."""
    NOTHING_MISSING = auto()
    """The pool has answered; it has the whole history."""
    LOOKUP_FAILED = auto()
    """The pool has not answered."""
    SHIPPED = auto()
    """The job goes to the workers with a step; the history is computed already."""
    SHIPPED_DURING_FORWARD = auto()
    """The job goes to the workers with the step that computes the end of the history."""
    STEP_CONFIRMED = auto()
    """That step has computed what it should."""
    CANCELLED = auto()
    """The KV must not become visible: the step failed, or the weights changed."""
    RANK_FAILED = auto()
    """A rank could not write its part."""
    RANK_DROPPED = auto()
    """A rank had no room for the job in its queue."""
    RANKS_DONE = auto()
    """The last rank has reported."""
    COMMIT_DONE = auto()
    """Rank 0 has replaced the record."""
    COMMIT_FAILED = auto()
    """Rank 0 has refused, or has not answered."""


_OUTCOMES = (SaveState.COMMITTED, SaveState.UNNEEDED, SaveState.FAILED, SaveState.DROPPED)

SAVE_TRANSITIONS: Transitions[SaveState, SaveEvent] = Transitions(
    {
        SaveState.LOOKING_UP: {
            SaveEvent.EXTENTS_MISSING: SaveState.PLANNED,
            SaveEvent.NOTHING_MISSING: SaveState.UNNEEDED,
            SaveEvent.LOOKUP_FAILED: SaveState.FAILED,
            SaveEvent.CANCELLED: SaveState.FAILED,
        },
        SaveState.PLANNED: {
            SaveEvent.SHIPPED: SaveState.WRITING,
            SaveEvent.SHIPPED_DURING_FORWARD: SaveState.WRITING_UNCONFIRMED,
            SaveEvent.CANCELLED: SaveState.FAILED,
        },
        SaveState.WRITING: {
            SaveEvent.STEP_CONFIRMED: SaveState.WRITING,
            SaveEvent.RANKS_DONE: SaveState.COMMITTING,
            SaveEvent.RANK_FAILED: SaveState.FAILING,
            SaveEvent.RANK_DROPPED: SaveState.DROPPING,
            SaveEvent.CANCELLED: SaveState.FAILING,
        },
        SaveState.WRITING_UNCONFIRMED: {
            SaveEvent.STEP_CONFIRMED: SaveState.WRITING,
            SaveEvent.RANKS_DONE: SaveState.UNCONFIRMED,
            SaveEvent.RANK_FAILED: SaveState.FAILING,
            SaveEvent.RANK_DROPPED: SaveState.DROPPING,
            SaveEvent.CANCELLED: SaveState.FAILING,
        },
        SaveState.UNCONFIRMED: {
            SaveEvent.STEP_CONFIRMED: SaveState.COMMITTING,
            SaveEvent.CANCELLED: SaveState.FAILED,
        },
        # What a commit names was written before, so it is as good as done.
        SaveState.COMMITTING: {
            SaveEvent.STEP_CONFIRMED: SaveState.COMMITTING,
            SaveEvent.CANCELLED: SaveState.COMMITTING,
            SaveEvent.COMMIT_DONE: SaveState.COMMITTED,
            SaveEvent.COMMIT_FAILED: SaveState.FAILED,
        },
        SaveState.FAILING: {
            SaveEvent.STEP_CONFIRMED: SaveState.FAILING,
            SaveEvent.CANCELLED: SaveState.FAILING,
            SaveEvent.RANK_FAILED: SaveState.FAILING,
            SaveEvent.RANK_DROPPED: SaveState.DROPPING,
            SaveEvent.RANKS_DONE: SaveState.FAILED,
        },
        SaveState.DROPPING: {
            SaveEvent.STEP_CONFIRMED: SaveState.DROPPING,
            SaveEvent.CANCELLED: SaveState.DROPPING,
            SaveEvent.RANK_FAILED: SaveState.DROPPING,
            SaveEvent.RANK_DROPPED: SaveState.DROPPING,
            SaveEvent.RANKS_DONE: SaveState.DROPPED,
        },
        # A late answer of the pool, or a late decision about the step, changes nothing.
        **{outcome: dict.fromkeys(SaveEvent, outcome) for outcome in _OUTCOMES},
    }
)
"""The next state of a save, by state and event."""
