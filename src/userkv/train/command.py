"""What ``userkv train`` does with its options."""

import dataclasses
import json
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from userkv.core import options
from userkv.core.errors import InvalidSettingError
from userkv.ranking.history_window import HistoryWindow
from userkv.train.evaluate import TOP, Case, Metrics, evaluate, leave_out, popularity
from userkv.train.export import check_output, save_ranker
from userkv.train.interactions import Interactions, read_interactions
from userkv.train.scorer import ModelScorer
from userkv.train.threads import one_thread
from userkv.train.trainer import FIRST_TOKEN, Trained, TrainSettings, train

DATA_VARIABLE = "USERKV_DATA"
DEFAULT_DATA = "../shared/data"
DEFAULT_LOG = "movielens-latest-small"


def train_command(args: Namespace) -> int:
    """Runs the command and returns its exit status, 0.

    Raises:
        InvalidSettingError: an option cannot be used.
        InvalidInputFileError: the log cannot be used.

    """
    settings = train_settings(args)
    output = Path(args.output).expanduser().resolve()
    check_output(output)
    data = Path(args.data) if args.data else Path(os.environ.get(DATA_VARIABLE) or DEFAULT_DATA) / DEFAULT_LOG
    if not args.data and not data.exists():
        raise InvalidSettingError(
            f"There is no {data}: name a log with --data, or the directory of {DEFAULT_LOG} with {DATA_VARIABLE}."
        )
    interactions = read_interactions(data, args.format, skip_bad=args.skip_bad)
    progress = sys.stderr.isatty()
    began = time.perf_counter()
    trained = train(interactions, settings, progress=progress)
    seconds = time.perf_counter() - began
    model, baseline = test(interactions, trained, progress=progress)
    report = {
        "data": {
            "path": str(data),
            "format": interactions.source,
            "users": len(interactions.users),
            "items": len(interactions.catalogue),
            "events": interactions.num_events,
            "skipped_lines": interactions.skipped,
        },
        "command": shlex.join(["userkv", "train", *_words(args)]),
        "settings": dataclasses.asdict(settings),
        "protocol": "leave-last-out, ranked among all items that are not in the user's history",
        "test": {"model": model.as_json(), "popularity": baseline.as_json()},
        "epochs": [
            {"loss": loss, **metrics.as_json()}
            for loss, metrics in zip(trained.losses, trained.validation, strict=True)
        ],
        "best_epoch": trained.best_epoch,
        "train_seconds": round(seconds, 1),
    }
    save_ranker(output, trained.model, interactions.catalogue, report)
    print(json.dumps(report, indent=2) if args.json else _text(report, interactions, model, baseline, output))
    return 0


@one_thread()
def test(interactions: Interactions, trained: Trained, *, progress: bool) -> tuple[Metrics, Metrics]:
    """The test's metrics of the model and of popularity, on the same cases."""
    cases = leave_out(interactions, trained.settings.history_window)
    scorer = ModelScorer(trained.model, interactions.catalogue, FIRST_TOKEN)
    model = evaluate(_shown(cases, len(interactions.evaluated), progress), scorer)
    cases = leave_out(interactions, trained.settings.history_window)
    return model, evaluate(cases, popularity(interactions))


def train_settings(args: Namespace) -> TrainSettings:
    """The settings that the options ask for.

    Raises:
        InvalidSettingError: an option has a value that cannot be used.

    """
    given: dict[str, Any] = {}
    for name, minimum in (("epochs", 1), ("window", 2), ("layers", 1), ("dim", 1), ("heads", 1), ("seed", 0)):
        if getattr(args, name) is not None:
            given[name] = options.whole_number(f"--{name}", getattr(args, name), minimum)
    if args.learning_rate is not None:
        given["learning_rate"] = options.number("--learning-rate", args.learning_rate)
        if given["learning_rate"] <= 0:
            raise InvalidSettingError(f"--learning-rate must be above 0, not {args.learning_rate}.")
    if "window" in given:
        given["drop"] = HistoryWindow.of(given["window"]).drop_items
    settings = TrainSettings(**given)
    if settings.dim % settings.heads:
        raise InvalidSettingError(
            f"--dim must be a multiple of --heads, but {settings.dim} is none of {settings.heads}."
        )
    return settings


def _words(args: Namespace) -> Iterator[str]:
    """The options as they were given."""
    for name, value in vars(args).items():
        if name == "run" or value is None or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        if value is not True:
            yield str(value)


def _shown(cases: Iterable[Case], total: int, progress: bool) -> Iterable[Case]:
    shown: Iterable[Case] = tqdm(cases, total=total, unit="user", desc="testing", disable=not progress)
    return shown


def _text(report: dict[str, Any], interactions: Interactions, model: Metrics, baseline: Metrics, output: Path) -> str:
    data = report["data"]
    rows: list[tuple[str, ...]] = [("", f"HR@{TOP}", f"NDCG@{TOP}", "AUC")]
    rows += [
        (name, *(f"{value:.4f}" for value in (metrics.hr, metrics.ndcg, metrics.auc)))
        for name, metrics in (("HSTU", model), ("popularity", baseline))
    ]
    lines = ["  ".join([name.ljust(10), *(cell.rjust(8) for cell in cells)]).rstrip() for name, *cells in rows]
    return "\n".join(
        [
            f"{data['users']} users, {data['items']} items, {data['events']} events; "
            f"tasks: {', '.join(interactions.tasks)}",
            f"trained in {report['train_seconds']:.0f} s; the best of {len(report['epochs'])} epochs was "
            f"{report['best_epoch']}",
            f"last item of {model.users} users, ranked among all items not in their history:",
            *lines,
            f"\nServe it:  userkv serve --model {shlex.quote(str(output))}",
        ]
    )
