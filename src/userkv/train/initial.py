"""Where training starts: items that are seen together lie together, and near items of a history count more.

Both are things that a model of random weights learns, too, but only after many more epochs than a CPU has minutes for
(docs/training.md has the figures).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from userkv.models.hstu.reference import HSTULayer, HSTUModel
from userkv.train.interactions import UserHistory

TOGETHER = 10
"""Events between which two items count as seen together, the nearer the more."""

SMOOTHING = 30.0
"""Added to how often an item is seen: what is known of rare items is mostly chance."""

NOISE = 0.02
"""Standard deviation of what is random in an item's embedding, whose length is 1 otherwise."""

RECENT_BIAS = 8.0
"""Added to the attention score of the newest item of a history; the item before it gets half of it, and so on."""

_EXTRA = 16  # Singular vectors beyond the wanted ones, which make the wanted ones exact enough.


def initialise(model: HSTUModel, histories: Sequence[UserHistory], first_token: int, num_items: int) -> None:
    """Set item embeddings, positions and biases. What is drawn comes from torch's global generator.

    Args:
        model: changed in place.
        histories: what is trained with.
        first_token: of the catalogue's first item.
        num_items: of the catalogue.

    """
    with torch.no_grad():
        embedding = model.item_embedding.weight
        embedding.normal_(std=NOISE)
        embedding[first_token:] += item_directions(histories, num_items, embedding.shape[1])
        # Biases say how far back an item is; its place in the window says nothing more, and changes with every cut.
        model.position_embedding.weight.zero_()
        for layer in model.layers:
            assert isinstance(layer, HSTULayer)
            if layer.relative_bias is not None:
                distance = torch.arange(len(layer.relative_bias))
                layer.relative_bias.copy_((RECENT_BIAS / distance.clamp(min=1)) * (distance > 0))


def item_directions(histories: Sequence[UserHistory], num_items: int, dim: int) -> torch.Tensor:
    """A direction for each item from the singular vectors of how often items are seen together, ``[items, dim]``.

    Rows have length 1, or less where hardly anything is known about the item.
    """
    rows, columns, values = _together(histories)
    seen = np.bincount(rows, values, num_items) + SMOOTHING
    values = values / np.sqrt(seen[rows] * seen[columns])
    matrix = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([rows, columns])),
        torch.from_numpy(values.astype(np.float32)),
        (num_items, num_items),
        check_invariants=False,
    ).coalesce()
    left, _, _ = torch.svd_lowrank(matrix, q=min(dim + _EXTRA, num_items), niter=3)
    known = left[:, :dim]
    lengths = known.norm(dim=1, keepdim=True)
    directions = torch.zeros(num_items, dim)
    directions[:, : known.shape[1]] = known / lengths.clamp(min=float(lengths.median()) / 10 + 1e-12)
    # The layers normalise over the width, so no axis should mean more than the others.
    return directions @ torch.linalg.qr(torch.randn(dim, dim))[0]


def _together(
    histories: Sequence[UserHistory],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Pairs of items within :data:`TOGETHER` events, in both orders, and how much each counts."""
    rows, columns, values = [], [], []
    for history in histories:
        for distance in range(1, min(TOGETHER + 1, len(history.items))):
            before, after = history.items[:-distance], history.items[distance:]
            rows += [before, after]
            columns += [after, before]
            values.append(np.full(2 * len(before), distance**-0.5))
    return np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
