"""The user block table against a simple model: a dictionary of token lists."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.fake_block_pool import FakeBlock, FakeBlockPool
from userkv.cache.block_table import UserBlockTable, UserEntry
from userkv.cache.hit import count_held
from userkv.cache.policies.lru import UserKVLRUManager
from userkv.core.errors import IntegrityError
from userkv.core.tokens import as_tokens

BLOCK = 4
NUM_BLOCKS = 60
users = st.sampled_from("abcdef")


class TableAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = FakeBlockPool(NUM_BLOCKS)
        self.table: UserBlockTable[str] = UserBlockTable(BLOCK, self.pool, UserKVLRUManager())
        self.model: dict[str, list[int]] = {}
        self.order: list[str] = []
        self.running: list[str] = []

    @rule(user=users)
    def acquire(self, user: str) -> None:
        self.table.acquire(user)
        self.running.append(user)
        self.order = [other for other in self.order if other != user]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 30))
    def release(self, which: int) -> None:
        user = self.running.pop(which % len(self.running))
        self.table.release(user)
        if user not in self.running and user in self.model:
            self.order.append(user)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 30), keep=st.integers(0, 20), more=st.lists(st.integers(0, 3), min_size=1, max_size=12))
    def put(self, which: int, keep: int, more: list[int]) -> None:
        """A request that hit ``keep`` tokens and computed ``more``: whole blocks are shared, the tail is a copy."""
        user = self.running[which % len(self.running)]
        entry = self.table.get(user)
        tokens = self.model.get(user, [])[:keep]
        shared = list(entry.blocks[: len(tokens) // BLOCK]) if entry else []
        tokens = tokens + more
        if self.pool.num_free < -(-len(tokens) // BLOCK):
            return
        self.pool.touch(shared)
        blocks = shared + self.pool.take(-(-len(tokens) // BLOCK) - len(shared))
        self.table.put(user, as_tokens(tokens), blocks)
        self.pool.free_blocks(blocks)
        self.model[user] = tokens

    @rule(user=users, tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def request(self, user: str, tokens: list[int]) -> None:
        """From start to end, so that there are idle users to evict."""
        self.acquire(user)
        self.put(len(self.running) - 1, 0, tokens)
        self.release(len(self.running) - 1)

    @rule(user=users, length=st.integers(0, 30))
    def shorten(self, user: str, length: int) -> None:
        if user in self.running:
            self.table.shorten(user, length)
            if user in self.model:
                self.model[user] = self.model[user][:length]
                if not self.model[user]:
                    del self.model[user]

    @precondition(lambda self: self.order)
    @rule(at_most=st.integers(1, 12))
    def evict(self, at_most: int) -> None:
        """The victim loses his tail, and stays the first until nothing is left of him."""
        blocks = self.table.evict(at_most)
        victim = self.order[0]
        held = -(-len(self.model[victim]) // BLOCK)
        assert blocks == min(at_most, held)
        if blocks == held:
            del self.model[victim], self.order[0]
        else:
            self.model[victim] = self.model[victim][: (held - blocks) * BLOCK]

    @rule(user=users)
    def drop(self, user: str) -> None:
        self.table.drop(user)
        self.model.pop(user, None)
        self.order = [other for other in self.order if other != user]

    @rule()
    def clear(self) -> None:
        self.table.clear()
        self.model.clear()
        self.order.clear()

    @rule(user=users, tokens=st.lists(st.integers(0, 3), max_size=20))
    def look_up(self, user: str, tokens: list[int]) -> None:
        held = self.model.get(user, [])
        expected = next(
            (i for i, (x, y) in enumerate(zip(held, tokens, strict=False)) if x != y), min(len(held), len(tokens))
        )
        assert count_held(self.table.get(user), as_tokens(tokens)) == expected

    @invariant()
    def equals_the_model(self) -> None:
        self.table.check_integrity()
        assert {user: entry.tokens.tolist() for user, entry in self.table.user_to_blocks.items()} == self.model
        held = sum(-(-len(tokens) // BLOCK) for tokens in self.model.values())
        assert self.table.num_blocks == held == NUM_BLOCKS - self.pool.num_free
        assert max(block.ref_cnt for block in self.pool.blocks) <= 1


TestTableAgainstModel = TableAgainstModel.TestCase


@pytest.fixture
def table() -> UserBlockTable[str]:
    return UserBlockTable(BLOCK, FakeBlockPool(9), UserKVLRUManager())


def test_only_busy_users_get_blocks(table: UserBlockTable[str]) -> None:
    with pytest.raises(ValueError, match="no running request"):
        table.put("a", as_tokens([1]), [FakeBlock()])


@pytest.mark.parametrize(("tokens", "blocks"), [([], 0), ([1], 0), ([1], 2), ([1, 2, 3, 4, 5], 1)])
def test_tokens_must_fill_their_blocks(table: UserBlockTable[str], tokens: list[int], blocks: int) -> None:
    table.acquire("a")
    with pytest.raises(ValueError, match="do not fill"):
        table.put("a", as_tokens(tokens), [FakeBlock() for _ in range(blocks)])


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8])
def test_last_page_index(table: UserBlockTable[str], length: int) -> None:
    table.acquire("a")
    table.put("a", as_tokens([0] * length), [FakeBlock() for _ in range(-(-length // BLOCK))])
    entry = table.get("a")
    assert entry is not None
    assert entry.last_page_index(BLOCK) == length - (len(entry.blocks) - 1) * BLOCK


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.user_to_blocks.pop("a"),
        lambda table: table.user_to_blocks.update(b=table.user_to_blocks["a"]),
        lambda table: setattr(table, "num_blocks", 7),
        lambda table: setattr(table, "num_evictable_blocks", 7),
        lambda table: table._policy.discard("a"),
        lambda table: table._policy.add("z"),
    ],
)
def test_check_integrity_finds_damage(table: UserBlockTable[str], damage: object) -> None:
    table.acquire("a")
    table.put("a", as_tokens([1, 2, 3, 4, 5]), [FakeBlock(), FakeBlock()])
    table.release("a")
    table.check_integrity()
    damage(table)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_unused_tail_is_what_no_request_references() -> None:
    pool = FakeBlockPool(9)
    table: UserBlockTable[str] = UserBlockTable(BLOCK, pool, UserKVLRUManager())
    table.acquire("a")
    blocks = pool.take(4)
    table.put("a", as_tokens([0] * 16), blocks)
    assert table.unused_tail("a") == 0
    pool.free_blocks(blocks[2:])
    assert table.unused_tail("a") == 2
    pool.free_blocks(blocks[:1])
    assert table.unused_tail("a") == 2
    assert table.unused_tail("a", keep=3) == 1
    assert table.unused_tail("nobody") == 0


def test_a_victim_keeps_his_head_and_goes_on_losing_his_tail(table: UserBlockTable[str]) -> None:
    assert table.evict(1) == 0
    for user in "ab":
        table.acquire(user)
        table.put(user, as_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]), [FakeBlock() for _ in range(3)])
        table.release(user)
    assert [table.evict(1), table.num_blocks, table.num_evictable_blocks] == [1, 5, 5]
    entry = table.get("a")
    assert entry is not None
    assert (entry.tokens.tolist(), entry.num_blocks) == ([1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert [table.evict(2), table.get("a"), table.num_blocks] == [2, None, 3]
    table.acquire("b")
    assert [table.evict(1), table.num_evictable_blocks] == [0, 0]
    table.check_integrity()


def test_an_entry_is_equal_to_itself_alone() -> None:
    """A comparison with an entry is remembered, which an equal one of other blocks would spoil."""
    blocks = [FakeBlock()]
    one, other = UserEntry(as_tokens([1, 2]), blocks), UserEntry(as_tokens([1, 2]), blocks)
    assert one != other
    assert len({one, other}) == 2
    assert (one.blocks, one.num_blocks, one.num_tokens) == (tuple(blocks), 1, 2)
    assert one.tokens.tolist() == [1, 2]
