"""On which cores threads run that a bound worker starts."""

import json
import os
import subprocess
import sys

import pytest

CHILD = """
import json, os, sys, threading
from userkv.engine.pool.worker.spare_cores import spare_cores

main, *others = json.loads(sys.argv[1])

def cores():
    return sorted(os.sched_getaffinity(0))

def thread_cores():
    found = []
    thread = threading.Thread(target=lambda: found.append(cores()))
    thread.start()
    thread.join()
    return found[0]

go, bound, earlier = threading.Event(), threading.Barrier(len(others) + 1), []

def compute(own):
    os.sched_setaffinity(0, own)
    bound.wait()
    go.wait()
    earlier.append(cores())

old = [threading.Thread(target=compute, args=(own,)) for own in others]
for thread in old:
    thread.start()
os.sched_setaffinity(0, main)
bound.wait()
with spare_cores():
    inside = thread_cores()
after = cores()
try:
    with spare_cores():
        raise KeyError
except KeyError:
    pass
go.set()
for thread in old:
    thread.join()
print(json.dumps({"inside": inside, "after": [after, cores(), thread_cores()], "earlier": sorted(earlier)}))
"""

PARENT = """
import json, os, subprocess, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
subprocess.run([sys.executable, "-c", *sys.argv[2:]], check=True)
"""


def cores_of(parent: list[int], child: list[list[int]]) -> dict[str, list[int]]:
    """Which cores a new thread of a child of a process has, if the child's threads, the main one first, are bound."""
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


@pytest.mark.parametrize(
    ("parent", "child", "inside"),
    [
        pytest.param([0, 1], [[0]], [1], id="one is kept free of the model"),
        pytest.param([0, 1], [[0], [0]], [1], id="two threads on one"),
        pytest.param([0, 1], [[0], [1]], [0, 1], id="all compute"),
        pytest.param([0], [[0]], [0], id="there is only one"),
        pytest.param([0, 1], [[0, 1]], [0, 1], id="nothing is bound"),
        pytest.param([0], [[0, 1]], [0, 1], id="the parent is bound"),
    ],
)
def test_threads_of_a_bound_worker_run_where_none_of_it_computes(
    parent: list[int], child: list[list[int]], inside: list[int], two_cores: tuple[int, int]
) -> None:
    its = [[two_cores[place] for place in places] for places in child]
    found = cores_of([two_cores[place] for place in parent], its)
    assert found == {"inside": [two_cores[place] for place in inside], "after": [its[0]] * 3, "earlier": its[1:]}
