"""The pool's part of ``userkv serve``: from a few options to vLLM's ``--kv-transfer-config``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from userkv.core.errors import InvalidOptionError, InvalidSettingError
from userkv.core.pool_settings import (
    CONNECTOR,
    DEFAULT_LOCAL_DRAM_BYTES,
    DEFAULT_LOCAL_SSD_BYTES,
    PoolSettings,
)
from userkv.core.sizes import format_size
from userkv.serving.demo_model import userkv_home

KINDS = ("local", "mooncake", "none")
DIRECTORY_VARIABLE = "USERKV_POOL_DIR"
TRANSFER_OPTIONS = ("--kv-transfer-config", "-kvt")
"""vLLM's option that chooses a KV connector."""

_FLAGS = {"local_dir": "--pool-dir", "local_dram_bytes": "--pool-dram", "local_ssd_bytes": "--pool-ssd"}
"""Options of the connector -> ours that set them."""


def add_options(parser: argparse.ArgumentParser, default: str = "local") -> None:
    """Add the pool's options to a command that starts an engine; ``default`` is one of ``KINDS``."""
    group = parser.add_argument_group("the pool, which keeps users' KV outside the engine")
    group.add_argument(
        "--pool",
        choices=KINDS,
        default=default,
        help="local: memory and disk of this machine; mooncake: Mooncake Store, as MOONCAKE_CONFIG_PATH or a master "
        "that `userkv pool start` started here says; none (default: %(default)s)",
    )
    group.add_argument(
        "--pool-dir",
        metavar="DIR",
        help=f"directory of the local pool's disk tier (default: ${DIRECTORY_VARIABLE}, else pool/ in USERKV_HOME)",
    )
    dram, ssd = format_size(DEFAULT_LOCAL_DRAM_BYTES), format_size(DEFAULT_LOCAL_SSD_BYTES)
    group.add_argument("--pool-dram", metavar="SIZE", help=f"memory of the local pool, such as 4GiB (default: {dram})")
    group.add_argument("--pool-ssd", metavar="SIZE", help=f"disk space of the local pool (default: {ssd}; 0: no disk)")
    group.add_argument(
        "--pool-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="any other option of the connector, for example use_layerwise=true (docs/operations.md); repeatable",
    )


def pool_settings(args: argparse.Namespace, env: Mapping[str, str], without: str = "") -> dict[str, Any] | None:
    """``kv_connector_extra_config`` as the options say; ``None`` without a pool.

    Args:
        args: with the options of :func:`add_options`.
        env: environment variables.
        without: another option that leaves no place for a pool, whatever these say; "" if there is none.

    Raises:
        InvalidSettingError: an option cannot be used, or does not fit the others.

    """
    local = {"local_dir": args.pool_dir, "local_dram_bytes": args.pool_dram, "local_ssd_bytes": args.pool_ssd}
    local = {name: value for name, value in local.items() if value is not None}
    if without or args.pool == "none":
        if local or args.pool_option:
            advice = "leave the --pool-* options away" if without else "say --pool local, or leave its options away"
            raise InvalidSettingError(f"with {without or '--pool none'} there is no pool to set options of; {advice}")
        return None
    options: dict[str, Any] = {"backend": args.pool}
    if args.pool == "local":
        options |= local | {"local_dir": args.pool_dir or env.get(DIRECTORY_VARIABLE) or str(userkv_home() / "pool")}
    elif local:
        raise InvalidSettingError("--pool-dir, --pool-dram and --pool-ssd are for --pool local; leave them away")
    options.update(_named(args.pool_option))
    if (directory := options.get("local_dir")) and isinstance(directory, str):
        options["local_dir"] = str(Path(directory).expanduser().absolute())
    with naming_flags(args, options):
        PoolSettings.from_extra_config(options)
    return options


@contextmanager
def naming_flags(args: argparse.Namespace, options: Mapping[str, Any] | None) -> Iterator[None]:
    """In errors about an option of the connector, name the flag with which it was given.

    Args:
        args: see :func:`pool_settings`.
        options: what that has returned: without a pool of ours nothing is changed.

    """
    try:
        yield
    except InvalidOptionError as error:
        flag = _FLAGS.get(error.option)
        if options is None or flag is None or error.option in _named(args.pool_option):
            raise
        raise error.renamed(flag) from error


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``KVTransferConfig`` for a pool with these options."""
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        # Without it vLLM fails a request whose KV could not be loaded.
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options),
    }


def transfer_arguments(options: Mapping[str, Any] | None) -> Sequence[str]:
    """vLLM's command line for a pool with these options."""
    return () if options is None else (TRANSFER_OPTIONS[0], json.dumps(transfer_config(options)))


def describe(options: Mapping[str, Any] | None) -> str:
    """One line for the banner."""
    if options is None:
        return "none: KV that leaves the KV cache is computed again"
    if options["backend"] == "mooncake":
        return "Mooncake Store"
    settings = PoolSettings.from_extra_config(options)
    memory = f"{format_size(settings.local_dram_bytes)} of memory"
    if not settings.local_ssd_bytes:
        return memory
    return f"{memory}, {format_size(settings.local_ssd_bytes)} in {settings.local_dir}"


def _named(words: Sequence[str]) -> dict[str, Any]:
    options = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator:
            raise InvalidSettingError(f"--pool-option {word!r} has no value; write NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value  # A word, such as a directory.
    return options
