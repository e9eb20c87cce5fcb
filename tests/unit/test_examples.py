"""The examples that need no engine; the others are run by tests/e2e."""

import re

from tests.support.examples import run_example


def test_a_policy_of_ones_own_beats_lru_where_a_few_users_send_most_requests() -> None:
    said = dict(re.findall(r"(\w+): ([0-9.]+) of the prompt tokens hit", run_example("custom_policy.py")))
    assert float(said["FewestRequests"]) > float(said["UserKVLRUManager"]) > 0
