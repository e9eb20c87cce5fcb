"""A trace through a prefix cache of hashed blocks, as vLLM's: the yardstick."""

from collections import OrderedDict, deque
from collections.abc import Iterable

from userkv.sim.trace import SimRequest, SimResult


class ApcSimulation:
    """Full blocks under the hash of all tokens up to their end, least recently used first; candidates' blocks, too.

    Args:
        block_size: tokens per block.
        num_blocks: blocks there are.
        concurrency: requests that hold blocks at a time.

    """

    def __init__(self, block_size: int, num_blocks: int, concurrency: int = 1) -> None:
        self._block_size = block_size
        self._free_blocks = num_blocks
        self._concurrency = concurrency
        self._idle: OrderedDict[object, None] = OrderedDict()
        self._held: dict[object, int] = {}
        self._running: deque[tuple[list[object], int]] = deque()
        self._count = 0

    def run(self, requests: Iterable[SimRequest]) -> SimResult:
        """Take all requests, one after the other."""
        prompt = hits = 0
        for request in requests:
            prompt += len(request.history) + request.new_tokens
            hits += self._request(request)
        return SimResult(prompt, hits)

    def _request(self, request: SimRequest) -> int:
        while len(self._running) >= self._concurrency:
            self._end_oldest()
        self._count += 1
        size = self._block_size
        num_tokens = len(request.history) + request.new_tokens
        history = request.history.tobytes()
        item = request.history.itemsize
        keys: list[object] = [
            (request.user, hash(history[: end * item])) if end <= len(request.history) else (self._count, end)
            for end in range(size, num_tokens + 1, size)
        ]
        hit = 0
        # The engine must compute one token at least.
        while hit < len(keys) and (hit + 1) * size < num_tokens and self._is_cached(keys[hit]):
            hit += 1
        for key in keys[:hit]:
            self._hold(key)
        needed = -(-num_tokens // size) - hit
        while self._free_blocks + len(self._idle) < needed and self._running:
            self._end_oldest()
        for _ in range(needed):
            if self._free_blocks:
                self._free_blocks -= 1
            elif self._idle:
                self._idle.popitem(last=False)
        # A block whose hash is cached already stays beside it without being found; that is rare enough to leave out.
        for key in keys[hit:]:
            self._held[key] = self._held.get(key, 0) + 1
        self._running.append((keys, num_tokens))
        return hit * size

    def _is_cached(self, key: object) -> bool:
        return key in self._idle or key in self._held

    def _hold(self, key: object) -> None:
        self._idle.pop(key, None)
        self._held[key] = self._held.get(key, 0) + 1

    def _end_oldest(self) -> None:
        keys, num_tokens = self._running.popleft()
        # The last, partial block has no hash and is free at once; tails go before heads.
        self._free_blocks += num_tokens % self._block_size != 0
        for key in reversed(keys):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                self._idle[key] = None
