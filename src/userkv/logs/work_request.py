"""One request of a workload, as the difference to the user's previous request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkRequest:
    """One request, as the difference to the user's previous one.

    time: when it is issued, in seconds on the clock of the workload. user: who. new_items: appended to the history
    since the previous request. history_items_total: length of the history of this request, in items. candidates: the
    fresh items; without any, the request only brings the history in. drop: how many of the oldest items leave the
    history, *after* new_items were appended. anonymous: the user is not named to the target: an ordinary request.
    """

    time: float
    user: str
    new_items: tuple[int, ...]
    history_items_total: int
    candidates: tuple[int, ...]
    drop: int = 0
    anonymous: bool = False
