"""What ``userkv replay`` does with its options."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from userkv.client import RankInfo
from userkv.core import options
from userkv.core.errors import InvalidSettingError
from userkv.logs.events import BadLines
from userkv.ranking.item_codec import ItemCodec
from userkv.replay.driver import Record, Replay, ReplaySettings
from userkv.replay.inputs import Input, read_input
from userkv.replay.rank_target import RankTarget, codec_of, find_ranking_model
from userkv.replay.readings import Meter, Readings
from userkv.replay.report import Report, make_report
from userkv.replay.report_table import table
from userkv.replay.target import Target
from userkv.serving import pool_options
from userkv.serving.demo_model import DEMO_ENGINE_ARGUMENTS, VOCAB_SIZE, ensure_demo_model
from userkv.serving.rank_command import API_KEY

DEFAULT_DIGITS = 2
DEMO = "demo"
"""In place of a model's directory: the bundled model."""


def replay_command(args: Namespace) -> int:
    """Runs the command and returns its exit status: 0, or 1 if any request failed.

    Raises InvalidSettingError and InvalidInputFileError for options and files that cannot be used.
    """
    settings = ReplaySettings(
        speed=options.speed("--speed", args.speed),
        concurrency=options.whole_number("--concurrency", args.concurrency),
        users=not args.no_users,
        warmup=options.whole_number("--warmup", args.warmup, 0),
        progress=sys.stderr.isatty(),
    )
    _check_json_path(args.json)
    demo = args.offline == DEMO
    if demo:
        args.offline = str(ensure_demo_model())
    phases = options.whole_number("--phases", args.phases)
    engine_args = options.key_values("--engine-arg", args.engine_arg)
    pool = _pool(args, engine_args)
    target = _target(args, engine_args, DEMO_ENGINE_ARGUMENTS if demo else {}, pool)
    ranking = _ranking_model(args)
    vocab_size = ranking.item_vocab_size if ranking and args.vocab_size is None else _vocab_size(args)
    digits = None if args.digits is None else options.whole_number("--digits", args.digits)
    source = read_input(args)
    _tell_skipped(source.bad)
    if ranking is not None and digits is None and args.vocab_size is None:
        codec = codec_of(ranking)
    else:
        codec = ItemCodec.for_vocab(vocab_size, digits or source.tokens_per_item or DEFAULT_DIGITS)
    if ranking is not None:
        timeout_s = options.number("--timeout", args.timeout)
        target = RankTarget(args.server, codec, model=args.model, timeout_s=timeout_s, api_key=_api_key(args))
    meter = Meter(target, [options.whole_number("--cpu-of", pid) for pid in args.cpu_of], args.metrics)
    with pool_options.naming_flags(args, pool):
        records, readings = asyncio.run(_drive(Replay(source.requests, codec, target, settings), target, meter, codec))
    report = make_report(records, phases, readings)
    used = {
        "server": args.server,
        "endpoint": None if args.server is None else "/v1/completions" if ranking is None else "/v1/rank",
        "offline": args.offline,
        "engine_args": list(args.engine_arg),
        "pool": pool,
        "users": settings.users,
        "speed": "max" if settings.speed is None else settings.speed,
        "concurrency": settings.concurrency,
        "warmup": settings.warmup,
        "max_tokens": int(args.max_tokens),
        "vocab_size": vocab_size,
        "tokens_per_item": codec.tokens_per_item,
        "log": source.log_options,
    }
    _show(report, args, source, used)
    return 1 if report.total.failed else 0


async def _drive(replay: Replay, target: Target, meter: Meter, codec: ItemCodec) -> tuple[list[Record], Readings]:
    try:
        await target.start()
        records = await replay.run(meter.begin)
        return records, await meter.end(codec.encode_many([0]))
    finally:
        await target.close()


def _pool(args: Namespace, engine_args: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options of the offline engine's pool; None without one."""
    reasons = {
        "--server": args.server is not None,
        "--no-users": args.no_users,
        "--engine-arg kv_transfer_config": "kv_transfer_config" in engine_args,
    }
    reason = next((option for option, given in reasons.items() if given), "")
    if reason and args.pool != "none":
        raise InvalidSettingError(f"with {reason} there is no pool to choose; leave --pool away")
    return pool_options.pool_settings(args, os.environ, without=reason)


def _target(
    args: Namespace, engine_args: Mapping[str, Any], engine_defaults: Mapping[str, Any], pool: Mapping[str, Any] | None
) -> Target:
    if (args.server is None) == (args.offline is None):
        raise InvalidSettingError("Say where to send the requests: either --server URL or --offline MODEL_DIR.")
    max_tokens = options.whole_number("--max-tokens", args.max_tokens)
    timeout_s = options.number("--timeout", args.timeout)
    if timeout_s <= 0:
        raise InvalidSettingError(f"--timeout must be above 0 seconds, not {args.timeout}.")
    if args.server is not None:
        from userkv.replay.http_target import HttpTarget

        if engine_args:
            raise InvalidSettingError(
                "--engine-arg is for --offline: a server has been started with its arguments already."
            )
        return HttpTarget(
            args.server, model=args.model, max_tokens=max_tokens, timeout_s=timeout_s, api_key=_api_key(args)
        )
    from userkv.replay.engine_target import EngineTarget

    if args.model is not None:
        raise InvalidSettingError("--model is for --server: an offline engine has the model of --offline alone.")
    model_dir = Path(args.offline)
    if not model_dir.is_dir():
        raise InvalidSettingError(f"--offline must be the directory of a model, but {model_dir} is no directory.")
    engine_args = {**engine_defaults, **engine_args}
    if pool is not None:
        engine_args["kv_transfer_config"] = pool_options.transfer_config(pool)
    return EngineTarget(model_dir, engine_args, users=not args.no_users, max_tokens=max_tokens, timeout_s=timeout_s)


def _api_key(args: Namespace) -> str | None:
    key: str | None = args.api_key if args.api_key is not None else os.environ.get(API_KEY)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidSettingError("--api-key must be printable ASCII.")
    return key


def _ranking_model(args: Namespace) -> RankInfo | None:
    """What the server's ranking model takes; None if there is no such server, and completions are to be asked for."""
    if args.server is None:
        return None
    timeout_s = options.number("--timeout", args.timeout)
    found = asyncio.run(find_ranking_model(args.server, timeout_s, _api_key(args)))
    if found is not None and args.no_users:
        raise InvalidSettingError(
            "A ranking request names its user: leave --no-users out, and start the server with userkv serve --no-users."
        )
    return found


def _vocab_size(args: Namespace) -> int:
    """From the option, else from the offline model, else that of the bundled model."""
    if args.vocab_size is not None:
        return options.whole_number("--vocab-size", args.vocab_size)
    if args.offline is not None:
        config = Path(args.offline) / "config.json"
        try:
            size = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidSettingError(
                f"{config} does not tell the size of the vocabulary ({type(error).__name__}): give --vocab-size."
            ) from error
        return options.whole_number(f"vocab_size in {config}", str(size))
    return VOCAB_SIZE


def _check_json_path(path: str | None) -> None:
    """Before the run rather than after it; the write itself can still fail."""
    if path not in (None, "-") and (Path(path).is_dir() or not Path(path).parent.is_dir()):
        raise InvalidSettingError(f"--json must be the name of a file in an existing directory, not {path!r}.")


def _tell_skipped(bad: BadLines) -> None:
    if bad.count:
        first = "; ".join(f"line {line}: {reason}" for line, reason in bad.examples)
        more = "; ..." if bad.count > len(bad.examples) else ""
        print(f"userkv: skipped {bad.count} malformed lines of {bad.path} ({first}{more})", file=sys.stderr)


def _show(report: Report, args: Namespace, source: Input, used: dict[str, Any]) -> None:
    if args.json is None:
        print(table(report))
        return
    described: dict[str, Any] = {
        "file": args.file,
        "format": source.format,
        "skipped_lines": source.bad.count,
        "skipped_examples": [{"line": line, "reason": reason} for line, reason in source.bad.examples],
    }
    text = json.dumps(report.as_json(described, used), indent=2)
    if args.json == "-":
        print(text)
        return
    print(table(report))
    try:
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidSettingError(f"--json cannot write {args.json}: {error.strerror or error}.") from error
