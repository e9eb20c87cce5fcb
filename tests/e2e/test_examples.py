"""The example that starts an engine; ``rank_client.py`` is run by test_serve.py, against its server."""

import pytest

from tests.support.examples import run_example

pytestmark = pytest.mark.e2e


def test_the_second_request_of_a_user_takes_its_history_from_the_cache() -> None:
    said = run_example("offline_engine.py")
    assert "0 of 300 history tokens cached" in said.splitlines()
    assert "300 of 300 history tokens cached" in said.splitlines()
