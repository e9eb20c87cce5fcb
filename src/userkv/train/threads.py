"""How many threads PyTorch uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for PyTorch in this block, and what it was afterwards; of the whole process.

    The matrices here are small: a second thread makes training a sixth faster on an idle machine, and several times
    slower where another process wants the same core. And results then do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
