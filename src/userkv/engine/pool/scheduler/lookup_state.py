"""The states of a request's look-up in the pool, and the only place that says which event leads where.

    NOT_ASKED -> ASKED -> ANSWERED -> LOADING -> LOADED

An answer may be asked for again (it got old, or the user was saved meanwhile). A load is started once per request:
a request whose load failed, or that was preempted behind it, computes the rest itself.
"""

from enum import Enum, auto

from userkv.engine.pool.scheduler.transitions import Transitions


class LookupState(Enum):
    """Where a request's look-up stands."""

    NOT_ASKED = "not_asked"
    """The pool has not been asked, or what it said is void."""
    ASKED = "asked"
    """The answer has not arrived."""
    ANSWERED = "answered"
    """The answer is known; it may be a failure."""
    LOADING = "loading"
    """Workers load what the answer names."""
    LOADED = "loaded"
    """All ranks have loaded it."""
    LOAD_FAILED = "load_failed"
    """A rank has failed to load it."""

    @property
    def may_load(self) -> bool:
        """Whether no load was started yet."""
        return self in (LookupState.NOT_ASKED, LookupState.ASKED, LookupState.ANSWERED)


class LookupEvent(Enum):
    """What happens to a look-up."""

    ASK = auto()
    """The pool is asked."""
    ANSWER = auto()
    """The answer to the last question has arrived."""
    VOID = auto()
    """The weights have changed: no answer holds any more."""
    LOAD = auto()
    """The request got blocks, and a load fills them."""
    LOAD_DONE = auto()
    """All ranks have loaded."""
    LOAD_FAILED = auto()
    """A rank has failed; others may report the same later."""


LOOKUP_TRANSITIONS: Transitions[LookupState, LookupEvent] = Transitions(
    {
        LookupState.NOT_ASKED: {
            LookupEvent.ASK: LookupState.ASKED,
            LookupEvent.VOID: LookupState.NOT_ASKED,
        },
        LookupState.ASKED: {
            LookupEvent.ANSWER: LookupState.ANSWERED,
            LookupEvent.VOID: LookupState.NOT_ASKED,
        },
        LookupState.ANSWERED: {
            LookupEvent.ASK: LookupState.ASKED,
            LookupEvent.VOID: LookupState.NOT_ASKED,
            LookupEvent.LOAD: LookupState.LOADING,
        },
        LookupState.LOADING: {
            LookupEvent.VOID: LookupState.LOADING,
            LookupEvent.LOAD_DONE: LookupState.LOADED,
            LookupEvent.LOAD_FAILED: LookupState.LOAD_FAILED,
        },
        LookupState.LOADED: {
            LookupEvent.VOID: LookupState.LOADED,
        },
        LookupState.LOAD_FAILED: {
            LookupEvent.VOID: LookupState.LOAD_FAILED,
            LookupEvent.LOAD_FAILED: LookupState.LOAD_FAILED,
        },
    }
)
"""The next state of a look-up, by state and event."""
