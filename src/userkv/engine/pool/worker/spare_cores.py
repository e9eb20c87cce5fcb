"""On which cores the pool's threads run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def spare_cores() -> Iterator[None]:
    """Threads that are started meanwhile run where this process's parent may run and none of its threads is bound.

    On CPUs vLLM binds each thread of a worker that computes to a core of its own, the main thread to the first, and
    threads inherit that: transfers would take all their time from one core, for which the others wait in each layer.
    The cores that vLLM keeps free, for the engine's process, the parent, are less busy. Where it keeps none, transfers
    run on any of the worker's; where nothing is bound, as on GPUs, nothing changes. The calling thread is where it was
    again at the end.
    """
    if not hasattr(os, "sched_setaffinity"):  # Only Linux has it.
        yield
        return
    bound, computing = os.sched_getaffinity(0), _cores_of_threads()
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) - computing or computing)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def _cores_of_threads() -> set[int]:
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # It has just ended.
            cores |= os.sched_getaffinity(int(thread))
    return cores
