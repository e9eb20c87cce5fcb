"""Training: epochs with a falling learning rate, and the weights of the epoch that validated best."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from tqdm import tqdm

from userkv.models.hstu.config import HSTUConfig
from userkv.models.hstu.reference import HSTUModel
from userkv.ranking.history_window import HistoryWindow
from userkv.ranking.item_codec import DEFAULT_RESERVED
from userkv.train.batches import Batch, Batches
from userkv.train.evaluate import VALIDATION, Case, Metrics, evaluate, item_counts, leave_out
from userkv.train.initial import initialise
from userkv.train.interactions import Interactions, UserHistory
from userkv.train.negatives import NegativeSampler
from userkv.train.packed import packed_logits
from userkv.train.scorer import ModelScorer
from userkv.train.threads import one_thread

FIRST_TOKEN = DEFAULT_RESERVED
"""Of the catalogue; the tokens below it are kept free."""

WARM_UP = 0.1
"""Of the steps: the learning rate rises, and then falls to nothing."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How to train; the defaults are those that did best on MovieLens-small (docs/training.md).

    Attributes:
        epochs: times that all histories are learned from.
        window: longest history in items.
        drop: items that a full window loses at once.
        dim: width of the model.
        layers: of the model.
        heads: of each layer.
        dropout: in training.
        learning_rate: at its highest.
        weight_decay: of AdamW.
        batch_size: sequences of a step.
        moments: events that are learned from in each cut of each history, drawn anew each epoch.
        negatives: drawn for each event.
        validation_candidates: items that validation ranks the target among.
        seed: of everything that is drawn; equal seeds on one machine give equal models.

    """

    epochs: int = 6
    window: int = 256
    drop: int = 64
    dim: int = 64
    layers: int = 2
    heads: int = 2
    dropout: float = 0.2
    learning_rate: float = 4e-3
    weight_decay: float = 1e-4
    batch_size: int = 8
    moments: int = 8
    negatives: int = 16
    validation_candidates: int = 1000
    seed: int = 0

    @property
    def history_window(self) -> HistoryWindow:
        """What cuts histories.

        Raises:
            InvalidSettingError: window and drop do not fit.

        """
        return HistoryWindow(self.window, self.drop)


@dataclass(frozen=True, slots=True)
class Trained:
    """The result.

    Attributes:
        model: with the weights of the best epoch, in evaluation mode.
        losses: mean loss of each epoch.
        validation: metrics after each epoch.
        best_epoch: which epoch the weights are of, from 1.

    """

    model: HSTUModel
    losses: list[float]
    validation: list[Metrics]
    best_epoch: int
    settings: TrainSettings = field(repr=False)


def make_config(settings: TrainSettings, num_catalogue: int, tasks: tuple[str, ...]) -> HSTUConfig:
    """The configuration of the model that is trained; it is also what makes its directory a ranking model's."""
    num_items = FIRST_TOKEN + num_catalogue
    head = settings.dim // settings.heads
    return HSTUConfig(
        num_items=num_items,
        item_embedding_dim=settings.dim,
        num_blocks=settings.layers,
        num_heads=settings.heads,
        dqk=head,
        dv=head,
        max_sequence_length=settings.window,
        linear_dropout_rate=settings.dropout,
        tasks=tasks,
        dtype="float32",
        userkv_ranking={
            "candidate_offset": num_items,
            "items": {"kind": "table", "reserved": FIRST_TOKEN},
            "score": "head",
            "history_window": {"max_items": settings.window, "drop_items": settings.drop},
        },
    )


@one_thread()
def train(
    interactions: Interactions,
    settings: TrainSettings,
    *,
    progress: bool = False,
    on_epoch: Callable[[int, float, Metrics], Any] | None = None,
) -> Trained:
    """Train a ranker on all but the last two positive events of each user, with one thread.

    Seeds PyTorch's global generator.

    Args:
        interactions: the log.
        settings: how.
        progress: show a bar on standard error.
        on_epoch: called with the epoch (from 1), its mean loss and its validation.

    """
    torch.manual_seed(settings.seed)
    rng = np.random.default_rng(settings.seed)
    sampler = NegativeSampler(item_counts(interactions, target=VALIDATION), rng)
    histories = _training_part(interactions)
    batches = Batches(
        histories,
        settings.history_window,
        sampler,
        rng,
        first_token=FIRST_TOKEN,
        batch_size=settings.batch_size,
        moments=settings.moments,
        negatives=settings.negatives,
    )
    model = HSTUModel(make_config(settings, len(interactions.catalogue), interactions.tasks))
    initialise(model, histories, FIRST_TOKEN, len(interactions.catalogue))
    # A logit stands for the logarithm of the chance that this item is chosen: see loss().
    torch.nn.init.constant_(model.heads.bias, -math.log(len(interactions.catalogue)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    total = settings.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=max(total, 2), pct_start=WARM_UP
    )
    cases = list(
        leave_out(
            interactions,
            settings.history_window,
            target=VALIDATION,
            negatives=settings.validation_candidates,
            seed=settings.seed,
        )
    )
    losses: list[float] = []
    validation: list[Metrics] = []
    best, best_weights = -math.inf, model.state_dict()
    with tqdm(total=total, unit="step", disable=not progress, desc="training") as bar:
        for epoch in range(1, settings.epochs + 1):
            model.train()
            sum_, count = 0.0, 0.0
            for batch in batches.epoch():
                value = loss(model, batch)
                optimizer.zero_grad()
                value.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                weight = float(batch.weights.sum())
                sum_, count = sum_ + value.item() * weight, count + weight
                bar.update()
            losses.append(sum_ / count)
            validation.append(validate(model, interactions, cases))
            if goodness(validation[-1]) > best:
                best, best_weights = goodness(validation[-1]), copy.deepcopy(model.state_dict())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", hr=f"{validation[-1].hr:.3f}")
            if on_epoch is not None:
                on_epoch(epoch, losses[-1], validation[-1])
    model.load_state_dict(best_weights)
    goodnesses = [goodness(metrics) for metrics in validation]
    return Trained(model.eval(), losses, validation, 1 + goodnesses.index(max(goodnesses)), settings)


def loss(model: HSTUModel, batch: Batch) -> torch.Tensor:
    """Noise-contrastive estimation: tell what users chose from what was drawn.

    With the logit moved by how often an item is drawn, the best logit of a candidate is the logarithm of the
    probability that the user chooses it (and likes it, and so on: one task each), whichever way negatives are drawn.
    So the served score, a sum of sigmoids, is a sum of probabilities on one scale.
    """
    logits = packed_logits(model, batch.packed) - batch.log_odds.unsqueeze(-1)
    each = F.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none").sum((-1, -2))
    return (each * batch.weights).sum() / batch.weights.sum()


def validate(model: HSTUModel, interactions: Interactions, cases: list[Case]) -> Metrics:
    """Metrics of the model as it is."""
    return evaluate(cases, ModelScorer(model, interactions.catalogue, FIRST_TOKEN))


def goodness(metrics: Metrics) -> float:
    """What the best epoch is best in: the NDCG of whole rankings, which is less a matter of luck than that of ten."""
    return float(np.mean(1 / np.log2(1 + np.asarray(metrics.ranks)))) if metrics.ranks else 0.0


def _training_part(interactions: Interactions) -> list[UserHistory]:
    """The histories before each user's validation target; whole ones of users who are not evaluated."""
    ends = {user.user: int(user.positives[-VALIDATION]) for user in interactions.evaluated}
    parts = []
    for user in interactions.users:
        end = ends.get(user.user, len(user.items))
        if end > 1:
            parts.append(UserHistory(user.user, user.items[:end], user.labels[:end]))
    return parts
