"""Leave-last-out evaluation: how high does the item that a user did choose rank among those that he did not know?

Any ranker can be evaluated: a :data:`Scorer` is a function of item ids, as ``/v1/rank`` has them, so the same cases
can go through a model in this process, through a server, or through counts of popularity.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from userkv.ranking.history_window import HistoryWindow
from userkv.train.interactions import Interactions

Scorer = Callable[[Sequence[int], Sequence[int]], Sequence[float] | npt.NDArray[np.floating]]
"""From the ids of a history, oldest first, and of candidates to the candidates' scores."""

TOP = 10
"""HR@10 and NDCG@10."""

TEST, VALIDATION = 1, 2
"""Which of a user's last positive events is the target, counted from the end."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question to a ranker.

    Attributes:
        user: whose.
        history: item ids, oldest first, cut to the window.
        candidates: item ids; the first is the one that the user chose, the others are not in the full history.

    """

    user: str
    history: list[int]
    candidates: list[int]


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means over users.

    Attributes:
        hr: share of users whose item is among the first ten.
        ndcg: 1 / log2(1 + rank) if it is, else 0.
        auc: share of the other candidates that rank below it.
        users: users.
        ranks: of each user, from 1; candidates with an equal score count half.

    """

    hr: float
    ndcg: float
    auc: float
    users: int
    ranks: list[float] = field(default_factory=list, repr=False)

    def as_json(self) -> dict[str, float]:
        """Without the single ranks."""
        return {name: value for name, value in asdict(self).items() if name != "ranks"}


def leave_out(
    interactions: Interactions,
    window: HistoryWindow | None = None,
    *,
    target: int = TEST,
    negatives: int | None = None,
    seed: int = 0,
) -> Iterator[Case]:
    """The cases of all users that have enough events, one each, in the order of the log.

    Args:
        interactions: the log.
        window: cuts histories; ``None``: whole histories.
        target: :data:`TEST` or :data:`VALIDATION`.
        negatives: draw so many others per user; ``None``: all of the catalogue. Equal seeds draw equally.
        seed: of the draw.

    """
    catalogue = interactions.catalogue
    rng = np.random.default_rng(seed)
    for user in interactions.evaluated:
        place = int(user.positives[-target])
        seen = user.items[:place]
        others = np.setdiff1d(np.arange(len(catalogue)), np.append(seen, user.items[place]), assume_unique=False)
        if negatives is not None and negatives < len(others):
            others = rng.choice(others, negatives, replace=False)
        history = seen[window.start(len(seen)) :] if window else seen
        candidates = np.concatenate([user.items[place : place + 1], others])
        yield Case(user.user, catalogue[history].tolist(), catalogue[candidates].tolist())


def evaluate(cases: Iterable[Case], scorer: Scorer) -> Metrics:
    """Ask a ranker all cases.

    Raises:
        ValueError: the ranker gave another number of scores than candidates, or a score that is no number.

    """
    ranks, below = [], []
    for case in cases:
        scores = np.asarray(scorer(case.history, case.candidates), np.float64)
        if scores.shape != (len(case.candidates),) or np.isnan(scores).any():
            raise ValueError(f"user {case.user}: {len(case.candidates)} candidates, but scores {scores!r}")
        others = scores[1:]
        better = float((others > scores[0]).sum()) + 0.5 * float((others == scores[0]).sum())
        ranks.append(1 + better)
        below.append(1 - better / len(others) if len(others) else 1.0)
    if not ranks:
        return Metrics(0.0, 0.0, 0.0, 0)
    found = [rank for rank in ranks if rank <= TOP]
    gains = [1 / math.log2(1 + rank) for rank in found]
    return Metrics(len(found) / len(ranks), sum(gains) / len(ranks), float(np.mean(below)), len(ranks), ranks)


def popularity(interactions: Interactions, *, target: int = TEST) -> Scorer:
    """The baseline: the more users chose an item before their own target, the higher it ranks, for everybody alike."""
    counts = item_counts(interactions, target=target)
    place = {int(item): int(count) for item, count in zip(interactions.catalogue, counts, strict=True)}
    return lambda history, candidates: [float(place[item]) for item in candidates]


def item_counts(interactions: Interactions, *, target: int) -> npt.NDArray[np.int64]:
    """How often each item of the catalogue is a positive event before the targets, int64 ``[items]``."""
    evaluated = {user.user: int(user.positives[-target]) for user in interactions.evaluated}
    chosen = [
        user.items[: evaluated.get(user.user)][user.labels[: evaluated.get(user.user), 0] > 0]
        for user in interactions.users
    ]
    return np.bincount(np.concatenate(chosen), minlength=len(interactions.catalogue)).astype(np.int64)
