"""The replay driver: order per user, concurrency, pace, and what it says of failures."""

import asyncio
import time
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric

from tests.support.fake_model_server import MODEL, FakeModelServer
from userkv.core.errors import InvalidSettingError
from userkv.logs.work_request import WorkRequest
from userkv.ranking.item_codec import ItemCodec
from userkv.replay.driver import Record, Replay, ReplaySettings
from userkv.replay.http_target import HttpTarget
from userkv.replay.target import Outcome, Target
from userkv.replay.tiers import Tiers, read_tiers

CODEC = ItemCodec(base=100, digits=2)


class FakeTarget:
    """Answers after ``delay_s`` and notes who was there at the same time."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.sent: list[tuple[list[int], str | None, int]] = []
        self.running: dict[str | None, int] = defaultdict(int)
        self.most_at_once = 0
        self.most_of_one_user = 0

    async def start(self) -> None:
        pass

    async def send(self, prompt_token_ids: list[int], user_id: str | None, history_len: int) -> Outcome:
        self.sent.append((prompt_token_ids, user_id, history_len))
        self.running[user_id] += 1
        self.most_at_once = max(self.most_at_once, sum(self.running.values()))
        self.most_of_one_user = max(self.most_of_one_user, *self.running.values())
        await asyncio.sleep(self.delay_s)
        self.running[user_id] -= 1
        return Outcome(True, None, len(prompt_token_ids), 0, 0.0, 0.0, None)

    async def metrics(self) -> list[Metric] | None:
        return None

    async def close(self) -> None:
        pass


def workload(users: list[str], times: list[float] | None = None) -> list[WorkRequest]:
    """One request per entry, each with one new item that tells its place in the user's own sequence."""
    counts: dict[str, int] = defaultdict(int)
    requests = []
    for index, user in enumerate(users):
        counts[user] += 1
        requests.append(
            WorkRequest(times[index] if times else 0.0, user, (counts[user],), counts[user], (5000 + index,))
        )
    return requests


def drive(requests: list[WorkRequest], target: Target, **options: object) -> list[Record]:
    async def run() -> list[Record]:
        try:
            await target.start()
            given = {"warmup": 0, "progress": False, **options}
            return await Replay(requests, CODEC, target, ReplaySettings(**given)).run()  # type: ignore[arg-type]
        finally:
            await target.close()

    return asyncio.run(run())


@settings(max_examples=30, deadline=None)
@given(users=st.lists(st.sampled_from("abc"), max_size=30), concurrency=st.integers(1, 5), open_loop=st.booleans())
def test_a_users_requests_stay_in_order(users: list[str], concurrency: int, open_loop: bool) -> None:
    requests = workload(users, [index / 10_000 for index in range(len(users))])
    target = FakeTarget()
    records = drive(requests, target, concurrency=concurrency, speed=10.0 if open_loop else None)
    assert [record.index for record in records] == list(range(len(users)))
    assert target.most_of_one_user <= 1
    if not open_loop:
        assert target.most_at_once <= concurrency
    for user in set(users):
        prompts = [(prompt, length) for prompt, sender, length in target.sent if sender == user]
        expected = list(range(1, len(prompts) + 1))
        assert [CODEC.decode(prompt[:length]) for prompt, length in prompts] == [expected[:n] for n in expected]
        assert [record.first_visit for record in records if record.user == user] == [n == 1 for n in expected]


def test_the_concurrency_is_used_though_one_user_dominates() -> None:
    target = FakeTarget(delay_s=0.01)
    drive(workload(["a"] * 10 + list("bcd")), target, concurrency=3)
    assert target.most_at_once == 3
    # Not held up behind the busy user: the others start while his second request is still to come.
    assert [user for _, user, _ in target.sent[:3]] == ["a", "b", "c"]


def test_dropped_items_leave_the_prompt() -> None:
    requests = [
        WorkRequest(0, "a", (1, 2, 3), 3, (9,)),
        WorkRequest(0, "a", (4, 5), 3, (8,), drop=2),
        WorkRequest(0, "a", (), 3, (7,)),
    ]
    target = FakeTarget()
    records = drive(requests, target)
    assert [CODEC.decode(prompt) for prompt, _, _ in target.sent] == [[1, 2, 3, 9], [3, 4, 5, 8], [3, 4, 5, 7]]
    assert [record.history_tokens for record in records] == [6, 6, 6]


def test_an_open_loop_follows_the_timestamps() -> None:
    target = FakeTarget(delay_s=0.05)
    records = drive(workload(list("abb"), [100.0, 102.0, 102.0]), target, speed=20.0)
    assert records[0].sent_s < 0.05
    assert records[1].sent_s == pytest.approx(0.1, abs=0.04)
    # Due with the second one, but of the same user: it waits, and is late by as much.
    assert records[2].sent_s >= records[1].ended_s
    assert records[2].late_s == pytest.approx(records[2].sent_s - 0.1, abs=0.01)


def test_an_open_loop_does_not_wait_for_answers() -> None:
    target = FakeTarget(delay_s=0.1)
    started = time.perf_counter()
    drive(workload([f"u{n}" for n in range(50)]), target, speed=1.0, concurrency=1)
    assert target.most_at_once == 50
    assert time.perf_counter() - started < 2


def test_without_users_nobody_is_named() -> None:
    target = FakeTarget()
    drive(workload(list("ab")), target, users=False)
    assert [user for _, user, _ in target.sent] == [None, None]


def test_warm_up_requests_are_not_recorded_and_share_no_prefix() -> None:
    target = FakeTarget()
    assert len(drive(workload(list("ab")), target, warmup=2)) == 2
    (warm, user, length), *_ = target.sent
    assert len(target.sent) == 4
    assert (user, length, len(warm)) == (None, 0, len(target.sent[2][0]))
    assert warm[0] not in {prompt[0] for prompt, _, _ in target.sent[2:]}


def test_an_item_that_does_not_fit_stops_before_anything_is_sent() -> None:
    target = FakeTarget()
    with pytest.raises(InvalidSettingError, match="10000 does not fit"):
        drive([*workload(["a"]), WorkRequest(0, "b", (10_000,), 1, (1,))], target)
    assert target.sent == []


def test_no_requests() -> None:
    assert drive([], FakeTarget(), warmup=1) == []


@pytest.mark.parametrize("numbers", [{"speed": 0.0}, {"speed": float("nan")}, {"concurrency": 0}, {"warmup": -1}])
def test_numbers_that_cannot_be_used(numbers: dict[str, float]) -> None:
    with pytest.raises(InvalidSettingError):
        ReplaySettings(**numbers)  # type: ignore[arg-type]


def test_requests_over_http() -> None:
    with FakeModelServer() as server:
        records = drive(workload(list("aba")), HttpTarget(server.url + "/v1/", max_tokens=3), concurrency=1)
        bodies = server.bodies
    assert [record.outcome.ok for record in records] == [True] * 3
    assert [record.outcome.prompt_tokens for record in records] == [4, 4, 6]
    assert [record.outcome.cached_tokens for record in records] == [0, 0, 2]
    assert all(0 < (record.outcome.ttft_s or 0) <= record.outcome.latency_s for record in records)
    first = bodies[0]
    assert first["prompt"] == CODEC.encode_many([1, 5000])
    assert first["kv_transfer_params"] == {"user_id": "a", "history_len": 2}
    assert (first["model"], first["max_tokens"], first["temperature"], first["stream"]) == (MODEL, 3, 0, True)


def test_no_user_reaches_the_server_without_users() -> None:
    with FakeModelServer() as server:
        drive(workload(["a"]), HttpTarget(server.url), users=False)
        assert "kv_transfer_params" not in server.bodies[0]


def test_a_server_that_wants_a_key() -> None:
    with FakeModelServer() as server:
        server.api_key = "secret"
        (record,) = drive(workload(["a"]), HttpTarget(server.url, api_key="secret"))
        assert record.outcome.ok
        with pytest.raises(InvalidSettingError, match=r"refuses the API key \(HTTP 401\); set --api-key"):
            drive(workload(["a"]), HttpTarget(server.url))


@pytest.mark.parametrize(
    ("trouble", "status", "message"),
    [
        (400, 400, "HTTP 400: no luck for bad"),
        (503, 503, "HTTP 503: no luck for bad"),
        ("error", 200, "engine trouble"),
        ("torn", 200, "the answer broke off"),
        ("garbage", None, "JSONDecodeError"),
        ("hang", None, "no full answer within 0.2 s"),
    ],
)
def test_failures_are_counted_and_do_not_stop_the_user(trouble: int | str, status: int | None, message: str) -> None:
    with FakeModelServer() as server:
        server.misbehave = {"bad": trouble}
        records = drive(workload(["bad", "good", "bad"]), HttpTarget(server.url, timeout_s=0.2))
        assert len(server.bodies) == 3
    assert [record.outcome.ok for record in records] == [False, True, False]
    failed = records[2]
    assert message in str(failed.outcome.error)
    assert (failed.outcome.status, failed.history_tokens, failed.outcome.prompt_tokens) == (status, 4, 0)


def test_a_server_that_goes_away_fails_the_requests() -> None:
    async def run() -> Outcome:
        with FakeModelServer() as server:
            target = HttpTarget(server.url)
            await target.start()
        outcome = await target.send([1, 2], None, 0)
        await target.close()
        return outcome

    outcome = asyncio.run(run())
    assert not outcome.ok
    assert outcome.status is None


def read_page(page: str | None) -> Tiers | None:
    async def run() -> Tiers | None:
        with FakeModelServer() as server:
            server.page = page
            target = HttpTarget(server.url)
            await target.start()
            metrics = await target.metrics()
            await target.close()
            return None if metrics is None else read_tiers(metrics)

    return asyncio.run(run())


def test_tiers_are_summed_over_engines() -> None:
    lines = [
        'userkv_history_tokens_total{engine="0",model_name="a b"} 1e+03',
        'userkv_history_tokens_total{engine="1",model_name="a b"} 500.0',
        'userkv_history_tokens_created{engine="0"} 1.7e+09',
        'userkv_hit_tokens_total{engine="1"} 100.0',
        'userkv_swapin_tokens_total{engine="0",tier="dram"} 20.0',
        'userkv_swapin_tokens_total{engine="1",tier="ssd"} 3.0',
    ]
    assert read_page("\n".join(lines)) == Tiers(hbm=100, dram=20, ssd=3, computed=1377, history=1500)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (None, Tiers()),  # Plain vLLM.
        ("", Tiers()),
        ("<html>a proxy</html>", Tiers()),
        ("userkv_hit_tokens_total{engine= many", None),
    ],
)
def test_servers_that_do_not_tell_tiers(page: str | None, expected: Tiers | None) -> None:
    assert read_page(page) == expected


def test_tiers_of_a_server_without_a_metrics_page_or_gone() -> None:
    async def run() -> list[object]:
        with FakeModelServer() as server:
            target = HttpTarget(server.url)
            await target.start()
            target._base += "/elsewhere"
            found: list[object] = [await target.metrics()]
        found.append(await target.metrics())
        await target.close()
        return found

    assert asyncio.run(run()) == [None, None]


def test_what_tiers_counted_between_two_readings() -> None:
    before = Tiers(hbm=10, dram=5, ssd=0, computed=85, history=100)
    assert Tiers(110, 15, 40, 135, 300).since(before) == Tiers(100, 10, 40, 50, 200)
    # A load of a request that was counted before the first reading: no negative figures.
    assert Tiers(10, 205, 0, 0, 200).since(before) == Tiers(0, 200, 0, 0, 100)
    assert before.since(before) is None
    assert Tiers(hbm=5, history=500).since(before) is None  # A restarted server.


def test_servers_that_cannot_be_used() -> None:
    with pytest.raises(InvalidSettingError, match="http://"):
        HttpTarget("localhost:8000")
    with pytest.raises(InvalidSettingError, match="cannot be reached"):
        drive([], HttpTarget("http://127.0.0.1:9"))
    with FakeModelServer() as server:
        with pytest.raises(InvalidSettingError, match="not the model 'other'"):
            drive([], HttpTarget(server.url, model="other"))
        with pytest.raises(InvalidSettingError, match="HTTP 404"):
            drive([], HttpTarget(server.url + "/elsewhere"))
