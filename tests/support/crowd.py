"""Threads that use one backend at once, and check what they get."""

import random
import threading

from tests.support.backends import Memory, filled, read
from userkv.store.backend import ObjectMissingError, PoolBackend, PoolFullError, PoolUnavailableError, StoreError

PATIENCE = 15.0


class Crowd:
    """Threads that put, get, replace and remove objects of the same few users, checking every byte they get."""

    def __init__(self, backend: PoolBackend, threads: int) -> None:
        self.backend = backend
        self.wrong: list[str] = []
        self.read = 0
        self.stop = threading.Event()
        self._numbers = iter(range(10**9))
        self._keys: list[tuple[str, str, Memory]] = []
        self._contents = [filled(nbytes, seed) for nbytes in (900, 40_000, 700_000) for seed in range(5)]
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(threads)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a thread hangs"

    def _run(self, seed: int) -> None:
        choose = random.Random(seed)
        while not self.stop.is_set():
            try:
                self._step(choose)
            except PoolUnavailableError:
                return
            except (ObjectMissingError, PoolFullError):
                continue
            except (StoreError, AssertionError) as error:
                self.wrong.append(repr(error))

    def _step(self, choose: random.Random) -> None:
        action = choose.random()
        if action < 0.35 or not self._keys:
            user, source = f"u{choose.randrange(9)}", choose.choice(self._contents)
            self.backend.count_request(user)
            key = f"{user}@{next(self._numbers)}"
            self.backend.put(user, key, source.parts)
            self._keys.append((user, key, source))
            return
        user, key, source = choose.choice(self._keys[-60:])
        if action < 0.75:
            data = source.data
            assert read(self.backend, user, key, len(data), choose.randrange(99)) == data, key
            self.read += 1
        elif action < 0.85:
            self.backend.put_record(user, f"{user}@record", bytes([choose.randrange(256)]) * 2048)
        elif action < 0.95:
            record = self.backend.get_record(user, f"{user}@record")
            assert record is None or len(record) == 2048, "record"
            self.backend.locate(user, [key])
        else:
            self.backend.remove(user, [key])
