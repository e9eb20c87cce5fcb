"""A state machine as a table: what each event does in each state."""

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from userkv.core.errors import IntegrityError

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class Transitions(Generic[State, Event]):
    """The transitions of one kind of object. Immutable, so any thread may use it.

    Args:
        table: the next state by state and event. An event that a state does not list is illegal in that state.

    """

    def __init__(self, table: Mapping[State, Mapping[Event, State]]) -> None:
        self.table = table

    def next(self, state: State, event: Event) -> State:
        """The state after ``event``.

        Raises:
            IntegrityError: the event is illegal in this state.

        """
        following = self.table.get(state, {}).get(event)
        if following is None:
            raise IntegrityError(f"{event} cannot happen in {state}")
        return following
