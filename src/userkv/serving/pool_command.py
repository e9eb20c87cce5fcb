"""``userkv pool``: a Mooncake master on this machine, for pools that several engines share."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from userkv.core.errors import InvalidSettingError
from userkv.core.sizes import format_size

DEFAULT_PORT = 50051
DEFAULT_METRICS_PORT = 9003
NOT_RUNNING = 1

_DESCRIPTION = """\
Run the master of a Mooncake pool, which knows where users' KV lies; the memory is lent by the engines. One engine
alone needs none of this: its own pool (userkv serve --pool local) is faster.
"""

_CLUSTER = """\
For engines on other machines:
  - start it with --host, an address that they reach, in a network that nobody else does: whoever reaches
    port {metrics_port} can delete everything (POST /api/v1/remove_all asks for no password), and engines
    listen for transfers on all their addresses.
  - copy {config} to them, with local_hostname replaced by each machine's own address; for RDMA,
    set "protocol": "rdma" and "device_name".
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``pool`` to the command line."""
    parser = subparsers.add_parser("pool", help="run the master of a Mooncake pool", description=_DESCRIPTION)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    start = commands.add_parser("start", help="start a master and write mooncake.json")
    start.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    start.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port of the master; 0 picks one (default: %(default)s)"
    )
    start.add_argument(
        "--metrics-port",
        type=int,
        default=DEFAULT_METRICS_PORT,
        metavar="PORT",
        help="port of metrics and administration; 0 picks one (default: %(default)s)",
    )
    start.add_argument(
        "--ssd",
        metavar="DIR",
        help="also keep KV in files: every engine below this directory of its machine, up to 90%% of the disk",
    )
    start.set_defaults(run=_start)
    status = commands.add_parser("status", help=f"say how the pool is; exits with {NOT_RUNNING} if it does not run")
    status.set_defaults(run=_status)
    stop = commands.add_parser("stop", help="stop the master; what is in memory is lost")
    stop.set_defaults(run=_stop)
    for command in (start, status, stop):
        command.add_argument(
            "--dir", metavar="DIR", help="directory of the running pool's files (default: userkv/ in $XDG_RUNTIME_DIR)"
        )


def _start(args: argparse.Namespace) -> int:
    from userkv.serving.pool_master import LOG_NAME, start_master
    from userkv.store.mooncake.config import CONFIG_NAME, DEFAULT_SEGMENT_SIZE

    directory = _directory(args)
    ssd = str(Path(args.ssd).expanduser().absolute()) if args.ssd else ""
    pool = start_master(directory, args.host, args.port, args.metrics_port, ssd)
    config = directory / CONFIG_NAME
    print(f"Mooncake master at {pool.address}, pid {pool.pid}, metrics at http://{pool.metrics_address}/metrics")
    print(f"Log: {directory / LOG_NAME}\nSettings of this machine's engines: {config}\n")
    print(json.dumps(pool.client_settings(), indent=2))
    print("\nUse it:  userkv serve --pool mooncake" + (f"  (with MOONCAKE_CONFIG_PATH={config})" if args.dir else ""))
    segment = format_size(DEFAULT_SEGMENT_SIZE)
    print(f"It lends {segment} of each engine's memory to the pool: global_segment_size.\n")
    if pool.ssd_directory:
        print(
            "Mooncake has no working limit for the files: they grow to about 70-90 % of the disk, and then the pool\n"
            "takes nothing new. Files of deleted users stay until then. Give it a file system of its own.\n"
        )
    print(_CLUSTER.format(metrics_port=pool.metrics_port, config=config), end="")
    return 0


def _status(args: argparse.Namespace) -> int:
    from userkv.serving.pool_master import read_pool
    from userkv.store.backend import PoolUnavailableError
    from userkv.store.mooncake.master import ask_master

    directory = _directory(args)
    pool = read_pool(directory)
    if pool is None or pool.process() is None:
        print(f"no pool runs with the files in {directory}")
        return NOT_RUNNING
    print(f"Mooncake master at {pool.address}, pid {pool.pid}")
    try:
        status = ask_master(pool.metrics_address, timeout=2)
    except PoolUnavailableError as error:
        print(f"It does not answer: {error}")
        return NOT_RUNNING
    print(f"clients  {status.clients}\nobjects  {status.keys}")
    for tier, used, budget in status.usage():
        print(f"{tier.value:8} {format_size(used)} of {format_size(budget)}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    from userkv.serving.pool_master import read_pool, stop_master

    directory = _directory(args)
    pool = read_pool(directory)
    if pool is None:
        print(f"no pool runs with the files in {directory}")
        return NOT_RUNNING
    was_running = stop_master(directory, pool)
    print(f"stopped the master at {pool.address}" if was_running else f"the master (pid {pool.pid}) had ended already")
    return 0


def _directory(args: argparse.Namespace) -> Path:
    from userkv.store.mooncake.config import runtime_directory

    if args.dir is not None and not args.dir:
        raise InvalidSettingError("--dir must not be empty; leave it out for the usual place")
    return Path(args.dir).expanduser().absolute() if args.dir else runtime_directory()
