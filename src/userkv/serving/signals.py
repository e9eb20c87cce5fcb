"""How Ctrl-C and SIGTERM reach the server: both as SIGTERM, and only in the server's own process."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import resource_tracker
from types import FrameType
from typing import NoReturn

from userkv.serving.child_processes import kill_children


def turn_interrupts_into_sigterm() -> None:
    """Block SIGINT here and in all children to come, and send this, the main thread, SIGTERM in its place.

    A terminal sends SIGINT to the children, too. Those that are still importing die of it with a traceback, and vLLM
    loses its workers before it can end them. SIGTERM raises ``SystemExit(0)`` until the server installs a handler of
    its own; not ``KeyboardInterrupt``, which vLLM swallows while it waits for its engine.

    Call it before anything starts threads (numpy does): one that does not block SIGINT would take it.
    """
    # The tracker removes the shared memory of engines that are killed while they start; nobody needs to hear of that.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    resource_tracker.ensure_running()  # It unblocks SIGINT when it starts, so it must have started before.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)  # Should a thread of somebody else's take it nevertheless.
    threading.Thread(
        target=_forward_interrupts, args=(threading.get_ident(),), name="userkv-signals", daemon=True
    ).start()


def _forward_interrupts(thread_id: int) -> NoReturn:
    while True:
        signal.sigwait({signal.SIGINT})
        # To that thread itself: it may sit in a system call that only a signal of its own interrupts.
        signal.pthread_kill(thread_id, signal.SIGTERM)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    kill_children()  # An engine that is still starting has nothing to lose, and does not end when it is asked to.
    raise SystemExit(0)
