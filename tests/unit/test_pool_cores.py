"""On which cores threads run that a bound worker starts."""

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, os, sys, threading
from userkv.engine.pool.cores import spare_cores

def cores():
    return sorted(os.sched_getaffinity(0))

def thread_cores():
    found = []
    thread = threading.Thread(target=lambda: found.append(cores()))
    thread.start()
    thread.join()
    return found[0]

go, earlier = threading.Event(), []
old = threading.Thread(target=lambda: (go.wait(), earlier.append(cores())))
os.sched_setaffinity(0, json.loads(sys.argv[1]))
old.start()
with spare_cores():
    inside = thread_cores()
after = cores()
try:
    with spare_cores():
        raise KeyError
except KeyError:
    pass
go.set()
old.join()
print(json.dumps({"inside": inside, "after": [after, cores(), thread_cores()], "earlier": earlier[0]}))
"""

PARENT = """
import json, os, subprocess, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
subprocess.run([sys.executable, "-c", *sys.argv[2:]], check=True)
"""


def cores_of(parent: list[int], child: list[int]) -> dict[str, list[int]]:
    """Which cores the threads of a child of a process have, each bound to some."""
    command = [sys.executable, "-c", PARENT, json.dumps(parent), CHILD, json.dumps(child)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, list[int]] = json.loads(done.stdout)
    return found


@pytest.fixture
def two_cores() -> tuple[int, int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    return cores[0], cores[1]


def test_threads_of_a_bound_worker_run_where_its_parent_may_and_it_may_not(two_cores: tuple[int, int]) -> None:
    one, other = two_cores
    found = cores_of([one, other], [one])
    assert found == {"inside": [other], "after": [[one]] * 3, "earlier": [one]}


@pytest.mark.parametrize(("parent", "child"), [([0], [0]), ([0, 1], [0, 1]), ([0], [0, 1])])
def test_where_there_is_nothing_to_spare_nothing_changes(
    parent: list[int], child: list[int], two_cores: tuple[int, int]
) -> None:
    its = [two_cores[place] for place in child]
    found = cores_of([two_cores[place] for place in parent], its)
    assert found == {"inside": its, "after": [its] * 3, "earlier": its}
