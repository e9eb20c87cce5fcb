"""An eviction policy of one's own, tried in the simulator beside LRU.

No engine is needed: the simulator drives the scheduler's own cache with a trace.
Run: ``python examples/custom_policy.py``
"""

import random
from collections import Counter
from collections.abc import Iterator

from userkv.cache.policies.lru import UserKVLRUManager
from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.request import UserKey
from userkv.core.tokens import as_tokens
from userkv.sim.hbm import HbmSimulation
from userkv.sim.trace import SimRequest


class FewestRequests(EvictionPolicy[UserKey]):
    """Evicts the user with the fewest requests so far. Finding it scans the idle users: good enough for a trial."""

    def __init__(self) -> None:
        self._requests: Counter[UserKey] = Counter()
        self._idle: dict[UserKey, None] = {}

    def count_request(self, user: UserKey, size: int) -> None:
        self._requests[user] += 1

    def add(self, user: UserKey) -> None:
        self._idle[user] = None

    def discard(self, user: UserKey) -> None:
        self._idle.pop(user, None)

    def victim(self) -> UserKey | None:
        return min(self._idle, key=self._requests.__getitem__, default=None)

    def clear(self) -> None:
        self._idle.clear()

    def __contains__(self, user: object) -> bool:
        return user in self._idle

    def __len__(self) -> int:
        return len(self._idle)


def trace(requests: int) -> Iterator[SimRequest]:
    """Users, a few of which send most of the requests; 200 tokens of history, 20 of candidates."""
    draw = random.Random(1)
    for _ in range(requests):
        (user,) = draw.choices(range(100), weights=[1 / (rank + 1) for rank in range(100)])
        yield SimRequest(f"user-{user}", as_tokens(range(user * 1000, user * 1000 + 200)), new_tokens=20)


def main() -> None:
    """Print the hit ratio of both policies, with HBM for 20 of 100 users."""
    for policy in (UserKVLRUManager[UserKey](), FewestRequests()):
        simulation = HbmSimulation(block_size=16, num_blocks=20 * 14, policy=policy)
        result = simulation.run(trace(3000))
        print(f"{type(policy).__name__}: {result.hit_ratio:.3f} of the prompt tokens hit")


if __name__ == "__main__":
    main()
