"""Where a hit is decided: how much of a request's history the user's entry in HBM holds.

Token by token, up to the first token that differs; the last block may be partly valid. Nothing else makes a hit: no
hash, no length, no age.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from userkv.cache.block_table import UserEntry
from userkv.core.tokens import TokenArray, common_prefix


class UserHit(NamedTuple):
    """History found in HBM: the first ``num_tokens`` tokens, in ``blocks`` (the last one may be partly valid)."""

    blocks: Sequence[Any]
    num_tokens: int


NO_HIT = UserHit((), 0)


def count_held(entry: UserEntry | None, history: TokenArray) -> int:
    """How many tokens of a history an entry holds: the longest common prefix."""
    return 0 if entry is None else common_prefix(entry.tokens, history)


def limit_hit(held: int, num_tokens: int, block_size: int, num_blocks: int) -> int:
    """How many of the ``held`` history tokens a request can take.

    At most ``num_tokens - 1``, since the engine must compute one token to have logits. A hit that ends inside a block
    needs one more block (the private copy of it). A request that would fill the whole cache cannot have that one, so
    its hit ends at a block's end.

    Args:
        held: tokens of its history that HBM holds.
        num_tokens: tokens that the request has (the prompt, and its output if it was preempted).
        block_size: tokens per block.
        num_blocks: all blocks that requests and users share.

    """
    hit = min(held, num_tokens - 1)
    if -(-num_tokens // block_size) >= num_blocks:
        hit -= hit % block_size
    return hit
