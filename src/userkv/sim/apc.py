"""A trace through a prefix cache of hashed blocks, as vLLM's: the yardstick."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable

from userkv.sim.trace import SimRequest, SimResult, run_through


class _Block:
    """A full block, found under the key of all tokens up to its end."""

    __slots__ = ("key", "ref_cnt")

    def __init__(self, key: object) -> None:
        self.key = key
        self.ref_cnt = 1


class ApcSimulation:
    """Full blocks under the hash of all tokens up to their end, least recently used first; candidates' blocks, too.

    Users mean nothing to it: equal tokens are shared.

    Args:
        block_size: tokens per block.
        num_blocks: blocks there are.
        concurrency: requests that hold blocks at a time.

    """

    def __init__(self, block_size: int, num_blocks: int, concurrency: int = 1) -> None:
        self._block_size = block_size
        self._num_free = num_blocks  # Blocks that hold nothing; they are taken first.
        self._concurrency = concurrency
        self._idle: OrderedDict[_Block, None] = OrderedDict()
        # A key may have several blocks: the last token is computed even if its block is cached.
        self._cached: defaultdict[object, list[_Block]] = defaultdict(list)
        self._running: deque[tuple[list[_Block], int]] = deque()
        self._count = 0

    def run(self, requests: Iterable[SimRequest]) -> SimResult:
        """Take all requests, one after the other."""
        return run_through(requests, self.request)

    def request(self, request: SimRequest) -> int:
        """Start a request, and end the oldest one if too many run: how many of its tokens were cached."""
        while len(self._running) >= self._concurrency:
            self._end_oldest()
        self._count += 1
        size = self._block_size
        num_tokens = len(request.history) + request.new_tokens
        history = request.history.tobytes()
        item = request.history.itemsize
        keys: list[object] = [
            hash(history[: end * item]) if end <= len(request.history) else (self._count, end)
            for end in range(size, num_tokens + 1, size)
        ]
        blocks: list[_Block] = []
        for key in keys:
            # The engine must compute one token at least.
            if key not in self._cached or (len(blocks) + 1) * size >= num_tokens:
                break
            blocks.append(self._cached[key][0])
        hit = len(blocks)
        for block in blocks:
            self._idle.pop(block, None)
            block.ref_cnt += 1
        needed = -(-num_tokens // size) - hit
        while self._num_free + len(self._idle) < needed and self._running:
            self._end_oldest()
        for _ in range(needed):
            if self._num_free:
                self._num_free -= 1
            elif self._idle:
                self._forget(self._idle.popitem(last=False)[0])
        for key in keys[hit:]:
            blocks.append(_Block(key))
            self._cached[key].append(blocks[-1])
        self._running.append((blocks, num_tokens))
        return hit * size

    def _forget(self, block: _Block) -> None:
        self._cached[block.key].remove(block)
        if not self._cached[block.key]:
            del self._cached[block.key]

    def _end_oldest(self) -> None:
        blocks, num_tokens = self._running.popleft()
        # The last, partial block has no hash and is free at once; tails go before heads.
        self._num_free += num_tokens % self._block_size != 0
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._idle[block] = None
