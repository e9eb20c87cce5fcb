"""Child processes of the server: none may outlive it."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys

import psutil

GRACE_SECONDS = 25.0
"""How long children may take to end by themselves; a vLLM worker writes down its pool and frees its memory."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies (Linux), so that :func:`end_children` finds them.

    vLLM's workers are children of its engine process, which may end, or be killed, before them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children(grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait for all descendants to end, and kill those that do not. SIGTERM is ignored from here on.

    Python's resource tracker is left alone: it cleans up after this process and then ends.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    psutil.wait_procs(_children(), timeout=grace_seconds)
    psutil.wait_procs(kill_children(), timeout=grace_seconds)


def kill_children() -> list[psutil.Process]:
    """Kill all descendants but the resource tracker, and return them; they may take a moment to end."""
    children = _children()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return children


def _children() -> list[psutil.Process]:
    children = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # It may end, or be a zombie, while it is looked at.
            if not any("resource_tracker import main" in word for word in child.cmdline()):
                children.append(child)
    return children
