"""From a log of what users did to histories with labels: what happened, in order of time, and how it was liked."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from userkv.core.errors import InvalidInputFileError, InvalidSettingError
from userkv.logs.detect import WORKLOAD, detect_format
from userkv.logs.events import BadLines, Event, read_lines
from userkv.logs.formats import SOURCES
from userkv.logs.kuairand import KUAIRAND
from userkv.logs.otto import OttoLog
from userkv.logs.ratings import RATINGS

MIN_POSITIVES = 3
"""Of a user who is evaluated: one is the test's target, one the validation's, one is the shortest history."""

MIN_USERS = 5
"""Fewer users than this, with ``MIN_POSITIVES``, are no log to train with."""

LIKED = 4.0
"""From this rating on, a film counts as liked."""

_KUAIRAND_TASKS = {"is_click": "click", "is_like": "like", "long_view": "long_view"}


@dataclass(frozen=True, slots=True)
class UserHistory:
    """What one user did, oldest first.

    Attributes:
        user: the name in the log.
        items: int64 ``[events]``: places in the catalogue.
        labels: float32 ``[events, tasks]``, 0 or 1. The first task says whether the event is one to predict: an
            exposure that was not clicked is in the history, too, and is a negative example.

    """

    user: str
    items: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]

    @property
    def positives(self) -> npt.NDArray[np.int64]:
        """Places of the events to predict that have something before them."""
        places = np.flatnonzero(self.labels[:, 0])
        return places[places > 0]


@dataclass(frozen=True, slots=True)
class Interactions:
    """A log.

    Attributes:
        catalogue: int64 ``[items]``: the item ids, each once, ascending.
        tasks: names of the labels.
        users: the histories, in the order in which users first occur.
        source: name of the log's format.
        skipped: malformed lines that were left out.

    """

    catalogue: npt.NDArray[np.int64]
    tasks: tuple[str, ...]
    users: list[UserHistory]
    source: str
    skipped: int = 0

    @property
    def num_events(self) -> int:
        """Events of all users."""
        return sum(len(user.items) for user in self.users)

    @property
    def evaluated(self) -> list[UserHistory]:
        """The users who have enough to be trained and tested with."""
        return [user for user in self.users if len(user.positives) >= MIN_POSITIVES - 1]


def read_interactions(path: Path, source: str | None = None, *, skip_bad: bool = False) -> Interactions:
    """Read a log of one of the formats of ``userkv replay``.

    Args:
        path: the log; of a directory, its ``ratings.csv``.
        source: name of the format; ``None``: by the first line.
        skip_bad: leave malformed lines out instead of raising.

    Raises:
        InvalidInputFileError: the file cannot be read, has a malformed line, or has too few users.
        InvalidSettingError: there is no such format.

    """
    if path.is_dir():
        path = path / "ratings.csv"
    if source is not None and source not in SOURCES:
        raise InvalidSettingError(f"--format must be one of {', '.join(SOURCES)}, not {source!r}.")
    source = source or detect_format(path)
    if source == WORKLOAD:
        raise InvalidInputFileError(f"{path} is a workload file, which says nothing about what users did: use a log.")
    events, tasks, label, bad = _read(path, source, skip_bad)
    users = _histories(events, label, len(tasks), shuffle_ties=source == "ratings")
    catalogue = np.unique(np.fromiter((event.item for event in events), np.int64, len(events)))
    interactions = Interactions(
        catalogue,
        tasks,
        [dataclasses.replace(user, items=np.searchsorted(catalogue, user.items)) for user in users],
        source,
        bad.count,
    )
    if len(interactions.evaluated) < MIN_USERS:
        raise InvalidInputFileError(
            f"{path} has {len(interactions.evaluated)} users with at least {MIN_POSITIVES} events to learn from, and "
            f"training needs {MIN_USERS}: use a larger log."
        )
    return interactions


Label = Callable[[Event], Sequence[float]]


def _read(path: Path, source: str, skip_bad: bool) -> tuple[list[Event], tuple[str, ...], Label, BadLines]:
    """The events with their signals, the tasks, and the labels of an event."""
    bad = BadLines(str(path), skip_bad)
    lines = read_lines(path, bad)
    match source:
        case "otto":
            # Whoever orders an item touched it: "click" is any event, as the format's own task has it.
            log = list(OttoLog(types=True).read(lines, bad))
            return log, ("click", "cart", "order"), _otto_labels, bad
        case "ratings":
            reader = dataclasses.replace(RATINGS, signals=("rating",))
            return list(reader.read(lines, bad)), ("watch", "like"), _rating_labels, bad
        case _:
            _, header = next(read_lines(path, BadLines(str(path))), (1, ""))
            columns = tuple(
                name for name in _KUAIRAND_TASKS if name in {text.strip(' "') for text in header.split(",")}
            )
            reader = dataclasses.replace(KUAIRAND, numeric=columns, signals=columns)
            tasks = tuple(_KUAIRAND_TASKS[column] for column in columns) or ("view",)
            return list(reader.read(lines, bad)), tasks, _column_labels, bad


def _otto_labels(event: Event) -> Sequence[float]:
    return 1.0, float(event.signals[0] == "carts"), float(event.signals[0] == "orders")


def _rating_labels(event: Event) -> Sequence[float]:
    return 1.0, float(float(event.signals[0]) >= LIKED)


def _column_labels(event: Event) -> Sequence[float]:
    return [float(float(signal) > 0) for signal in event.signals] or (1.0,)


def _histories(events: Sequence[Event], label: Label, num_tasks: int, shuffle_ties: bool) -> list[UserHistory]:
    by_user: dict[str, list[Event]] = {}
    for event in events:
        by_user.setdefault(event.user, []).append(event)
    histories = []
    for user, own in by_user.items():
        # A log of ratings is sorted by film, and a sixth of MovieLens' ratings share their second with another one:
        # the file's order would let a model learn that the next film has a higher number.
        own.sort(key=lambda event: (event.time, _tie(event) if shuffle_ties else b""))
        labels = np.array([label(event) for event in own], np.float32).reshape(len(own), num_tasks)
        histories.append(UserHistory(user, np.array([event.item for event in own], np.int64), labels))
    return histories


def _tie(event: Event) -> bytes:
    """A place among events of the same second that depends on nothing but user and item, and tells nothing."""
    return hashlib.blake2b(f"{event.user}/{event.item}".encode(), digest_size=8).digest()
