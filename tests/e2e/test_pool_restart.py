"""The embedded pool over restarts: known users come back from disk, and what a bad disk returns is never used."""

import random
from pathlib import Path

import pytest

from tests.support.engine import Ask, metric
from tests.support.pool_engine import assert_same, history_of, pool_engine, save_and_leave_hbm, saved, wait_for

pytestmark = pytest.mark.e2e

USERS = {f"user-{i}": 600 + 50 * i for i in range(6)}


def asks() -> list[Ask]:
    return [Ask(history_of(user, length), [20, 21], user) for user, length in USERS.items()]


def test_users_survive_a_restart_and_damage_is_noticed(tmp_path: Path) -> None:
    options = {"local_dir": str(tmp_path / "pool"), "local_dram_bytes": "64MiB"}
    with pool_engine(options) as engine:
        save_and_leave_hbm(engine, asks())

    with pool_engine(options) as engine:
        from_ssd = metric("userkv_pool_lookups_total", result="ssd")
        answers = [answer for ask in asks() for answer in assert_same(engine, [ask])]
        assert [answer.cached for answer in answers] == list(USERS.values())
        wait_for(lambda: metric("userkv_pool_lookups_total", result="ssd") == from_ssd + len(USERS), engine)

    damage(tmp_path / "pool")
    with pool_engine(options) as engine:
        corrupt = metric("userkv_pool_corrupt_objects_total")
        answers = [answer for ask in asks() for answer in assert_same(engine, [ask])]
        assert any(answer.cached == 0 for answer in answers)
        wait_for(lambda: metric("userkv_pool_corrupt_objects_total") > corrupt, engine)
        # A lost user has been computed and saved again.
        save_and_leave_hbm(engine, [])
        again = [answer for ask in asks() for answer in assert_same(engine, [ask])]
        assert [answer.cached for answer in again] == list(USERS.values())


def damage(directory: Path) -> None:
    """Flip a byte in some files, cut some, exchange some; whatever they are."""
    rng = random.Random(0)
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 5000)
    assert len(files) >= len(USERS)
    for path in files[::3]:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    for path in files[1::3]:
        path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    swapped = files[2::3]
    contents = [path.read_bytes() for path in swapped]
    for path, content in zip(swapped, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def test_two_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a part of each user. What one of them has lost does not exist."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    options = {"local_dir": str(tmp_path / "pool"), "local_dram_bytes": 0}
    with pool_engine(options, tensor_parallel_size=2) as engine:
        save_and_leave_hbm(engine, asks())
        assert [assert_same(engine, [ask])[0].cached for ask in asks()] == list(USERS.values())
        save_and_leave_hbm(engine, [])
        for path in (tmp_path / "pool" / "rank-1").rglob("*"):
            if path.is_file() and path.stat().st_size > 5000:
                path.unlink()
        answers = [assert_same(engine, [ask])[0] for ask in asks()]
        assert [answer.cached for answer in answers] == [0] * len(USERS)
        before = saved()
        save_and_leave_hbm(engine, [])
        assert saved() > before
        assert [assert_same(engine, [ask])[0].cached for ask in asks()] == list(USERS.values())
