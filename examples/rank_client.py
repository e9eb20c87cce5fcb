"""Rank candidates for a user on a running server.

Start one with ``make serve``, then: ``python examples/rank_client.py http://127.0.0.1:8000``
"""

import sys

from userkv.client import RankClient

HISTORY = [1010, 2024, 35, 4711, 977, 58]


def main(server: str) -> None:
    """Compute the history ahead of time, rank twice, and print what came from the cache."""
    with RankClient(server) as client:
        client.prefill("bob", history=HISTORY)  # When the app opens, say.
        for candidates in ([2500, 63, 808], [99, 4000, 7, 512]):
            result = client.rank("bob", history=HISTORY, candidates=candidates, top_k=2)
            usage = result.usage
            print(f"best: {list(result.ranking)}; {usage.cached_tokens.total} of {usage.history_tokens} tokens cached")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
