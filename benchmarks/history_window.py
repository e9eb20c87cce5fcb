"""What cutting long histories in blocks does to the cache and to the ranking's quality.

    .venv/bin/python benchmarks/history_window.py --quality

The cache: a user's requests in the log's order, one for every ``--every`` events, each with the history so far, cut
to the window. A token is found if it belongs to the prefix that this history shares with the user's previous one, as
in a cache that loses nobody. This is a count, not a measurement; it takes seconds.

The quality (``--quality``, minutes): a model is trained for each window and evaluated as ``userkv train`` does it, and
its histories are cut in blocks, as in training, and by one item. Users whose history fits into the smallest window are
the same in all rows, so the others are given by themselves, too.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from userkv.ranking.history_window import HistoryWindow
from userkv.train.evaluate import Metrics, Scorer, evaluate, leave_out, popularity
from userkv.train.interactions import Interactions, read_interactions
from userkv.train.scorer import ModelScorer
from userkv.train.threads import one_thread
from userkv.train.trainer import FIRST_TOKEN, TrainSettings, train

WINDOWS = (256, 512, 1024)
DROPPED = (8, 4, 2)
"""Parts of the window that are dropped at once."""


def cuts(window: int) -> dict[str, HistoryWindow]:
    """The windows of a size that are compared, by name."""
    return {"one item": HistoryWindow(window, 1)} | {
        f"1/{part}": HistoryWindow(window, window // part) for part in DROPPED
    }


def hit_ratio(interactions: Interactions, window: HistoryWindow, every: int) -> dict[str, float]:
    """Share of history tokens that a user's previous request left: of all, and beyond the window."""
    found = {"all": 0, "beyond": 0}
    tokens = {"all": 0, "beyond": 0}
    for user in interactions.users:
        previous: tuple[int, int] | None = None
        for length in range(every, len(user.items) + 1, every):
            start = window.start(length)
            shared = previous[1] - start if previous is not None and previous[0] == start else 0
            previous = (start, length)
            for kind in ("all", "beyond") if length > window.max_items else ("all",):
                tokens[kind] += length - start
                found[kind] += shared
    ratios = {kind: found[kind] / tokens[kind] if tokens[kind] else float("nan") for kind in tokens}
    return ratios | {"beyond_share": tokens["beyond"] / tokens["all"]}


def remembering(scorer: Scorer) -> Scorer:
    """The same scorer, which answers the same question once: most histories are the same with every cut."""
    known: dict[tuple[tuple[int, ...], int, int], Any] = {}

    def score(history: Sequence[int], candidates: Sequence[int]) -> Any:
        question = (tuple(history), candidates[0], len(candidates))
        if question not in known:
            known[question] = scorer(history, candidates)
        return known[question]

    return score


def quality(interactions: Interactions, window: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Metrics of a model for this window, with each cut, for all users and for those with long histories."""
    drop = HistoryWindow.of(window).drop_items
    for seed in range(seeds):
        settings = TrainSettings(window=window, drop=drop, seed=seed)
        trained = train(interactions, settings, progress=True)
        scorer = remembering(ModelScorer(trained.model, interactions.catalogue, FIRST_TOKEN))
        for name, cut in (("one item", HistoryWindow(window, 1)), ("1/4", settings.history_window)):
            cases = leave_out(interactions, cut)
            with one_thread():
                metrics = evaluate(
                    tqdm(cases, total=len(interactions.evaluated), desc=f"window {window}, {name}"), scorer
                )
            yield {"window": window, "cut": name, "seed": seed, **_by_length(metrics, interactions)}


def _by_length(metrics: Metrics, interactions: Interactions) -> dict[str, Any]:
    lengths = np.array([int(user.positives[-1]) for user in interactions.evaluated])
    long = np.array(metrics.ranks)[lengths > min(WINDOWS)]
    gains = np.where(long <= 10, 1 / np.log2(1 + long), 0)
    return metrics.as_json() | {
        "long_users": len(long),
        "long_hr": float((long <= 10).mean()),
        "long_ndcg": float(gains.mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="histories cut in blocks: hit ratio and quality")
    parser.add_argument("--data", default=os.environ.get("USERKV_DATA", "../shared/data"), help="directory of the logs")
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10], help="events from one request to the next")
    parser.add_argument("--quality", action="store_true", help="train a model for each window, too (minutes)")
    parser.add_argument("--seeds", type=int, default=1, help="models for each window")
    parser.add_argument("--windows", type=int, nargs="+", default=list(WINDOWS), help="items")
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    args = parser.parse_args()
    log = Path(args.data) / "movielens-latest-small"
    if not log.is_dir():
        parser.error(f"there is no {log}; name the directory of the logs with --data")
    interactions = read_interactions(log)
    cache = [
        {"every": every, "window": window, "cut": name, **hit_ratio(interactions, cut, every)}
        for every in args.every
        for window in args.windows
        for name, cut in cuts(window).items()
    ]
    for every in args.every:
        print(f"\nA request for every {every} events; history tokens found, of requests beyond the window (of all)\n")
        print(f"| window | beyond it | {' | '.join(cuts(8))} |\n|---:|---:|{'---:|' * len(cuts(8))}")
        for window in args.windows:
            rows = [row for row in cache if (row["every"], row["window"]) == (every, window)]
            cells = " | ".join(f"{row['beyond']:.1%} ({row['all']:.1%})" for row in rows)
            print(f"| {window} | {rows[0]['beyond_share']:.0%} | {cells} |")
    found: list[dict[str, Any]] = []
    if args.quality:
        baseline = evaluate(leave_out(interactions), popularity(interactions))
        found.append({"window": "", "cut": "popularity", "seed": 0, **_by_length(baseline, interactions)})
        for window in args.windows:
            found += quality(interactions, window, args.seeds)
        print(
            "\n| window | cut by | HR@10 | NDCG@10 | AUC | HR@10, long | NDCG@10, long |\n"
            "|---:|---|---:|---:|---:|---:|---:|"
        )
        for window, cut in dict.fromkeys((row["window"], row["cut"]) for row in found):
            same = [row for row in found if (row["window"], row["cut"]) == (window, cut)]
            means = [
                float(np.mean([row[name] for row in same])) for name in ("hr", "ndcg", "auc", "long_hr", "long_ndcg")
            ]
            print(f"| {window} | {cut} | {' | '.join(f'{mean:.4f}' for mean in means)} |")
    if args.json:
        Path(args.json).write_text(json.dumps({"cache": cache, "quality": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
