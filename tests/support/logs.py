"""Small logs with a pattern that can be learned, in the formats of public ones."""

import json
import random
from pathlib import Path

NUM_ITEMS = 40


def ratings(path: Path, users: int = 80, events: int = 12, seed: int = 0) -> Path:
    """Ratings where each film leads to the next of one round trip through all, and even numbers are liked."""
    rng = random.Random(seed)
    trip = rng.sample(range(100, 100 + NUM_ITEMS), NUM_ITEMS)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(users):
        first = rng.randrange(NUM_ITEMS)
        for event in range(events):
            item = trip[(first + event) % NUM_ITEMS]
            lines.append(f"{user},{item},{2.0 if item % 2 else 4.5},{1000 * user + event}")
    path.write_text("\n".join(lines) + "\n")
    return path


def otto(path: Path, users: int = 8) -> Path:
    """Sessions of five events of all types."""
    types = ("clicks", "clicks", "carts", "orders", "clicks")
    sessions = [
        {
            "session": user,
            "events": [{"aid": 10 + (user + n) % 9, "ts": 1000 * n, "type": kind} for n, kind in enumerate(types)],
        }
        for user in range(users)
    ]
    path.write_text("\n".join(json.dumps(session) for session in sessions) + "\n")
    return path


def kuairand(path: Path, users: int = 8) -> Path:
    """Exposures of which every other is clicked, the last never."""
    lines = ["user_id,video_id,time_ms,is_click,is_like,long_view"]
    lines += [
        f"{user},{(user + n) % 11},{1000 * n},{(n + 1) % 2},0,{int(n == 2)}" for user in range(users) for n in range(8)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
