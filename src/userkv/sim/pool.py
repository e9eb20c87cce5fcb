"""A trace through the user cache in HBM with a pool beneath."""

from collections.abc import Iterable

from userkv.cache.policies.policy import EvictionPolicy
from userkv.core.request import UserKey
from userkv.core.tokens import TokenArray, common_prefix
from userkv.sim.hbm import HbmSimulation
from userkv.sim.trace import SimRequest, SimResult, run_through


class PoolSimulation:
    """A pool of whole users. It is asked for what HBM does not have, and gets what had to be computed.

    Only requests that HBM cannot serve whole are uses of the pool, as in the engine. Therefore users that HBM keeps are
    the first to leave the pool, and the two tiers hold different users without any coordination. The policy gets what
    the local backend knows: the size of a user that the pool does not hold is a guess.

    Args:
        block_size: tokens per block.
        num_blocks: blocks that the pool holds.
        hbm: the cache above.
        policy: order of eviction.
        sees_all: count requests that HBM serves, too; for Belady's policy, which identifies requests by number.

    """

    def __init__(
        self,
        block_size: int,
        num_blocks: int,
        hbm: HbmSimulation,
        policy: EvictionPolicy[UserKey],
        sees_all: bool = False,
    ) -> None:
        self._block_size = block_size
        self._room = num_blocks
        self._hbm = hbm
        self._policy = policy
        self._sees_all = sees_all
        self._blocks: dict[UserKey, int] = {}
        self._histories: dict[UserKey, TokenArray] = {}

    def run(self, requests: Iterable[SimRequest]) -> SimResult:
        """Take all requests, one after the other."""
        return run_through(requests, self._request)

    def _request(self, request: SimRequest) -> int:
        user = UserKey(request.user)
        needed = len(request.history)
        in_hbm = self._hbm.request(request)
        if in_hbm < needed or self._sees_all:
            average = sum(self._blocks.values()) // max(1, len(self._blocks))
            self._policy.count_request(user, self._blocks.get(user, average))
            self._policy.discard(user)
        if in_hbm >= needed:
            if user in self._blocks and user not in self._policy:
                self._policy.add(user)
            return in_hbm
        in_pool = common_prefix(self._histories[user], request.history) if user in self._histories else 0
        if in_pool < needed:
            self._put(user, request.history)
        if user in self._blocks:
            self._policy.add(user)
        return max(in_hbm, in_pool)

    def _put(self, user: UserKey, history: TokenArray) -> None:
        blocks = -(-len(history) // self._block_size)
        before = self._blocks.get(user, 0)
        while sum(self._blocks.values()) - before + blocks > self._room:
            victim = self._policy.victim()
            if victim is None:
                return
            self._policy.discard(victim)
            del self._blocks[victim], self._histories[victim]
        self._blocks[user], self._histories[user] = blocks, history
