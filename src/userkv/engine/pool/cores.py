"""On which cores the pool's threads run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spare_cores() -> Iterator[None]:
    """Threads that are started meanwhile run where this process's parent may run and this process may not.

    On CPUs vLLM binds a worker to the cores that compute, and threads inherit that: transfers would take their time
    from the model's, while the cores that vLLM keeps free for the engine's process, the parent, are less busy. Where a
    worker is not bound, as on GPUs, nothing changes. The calling thread is where it was again at the end.
    """
    if not hasattr(os, "sched_setaffinity"):  # Only Linux has it.
        yield
        return
    bound = os.sched_getaffinity(0)
    spare = os.sched_getaffinity(os.getppid()) - bound
    if not spare:
        yield
        return
    os.sched_setaffinity(0, spare)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
