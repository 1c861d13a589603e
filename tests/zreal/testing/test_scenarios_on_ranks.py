"""Scenario files as tests on real ranks."""

from __future__ import annotations

import pytest

import zreal.backends
import zreal.rank.run
from tests.support.plugin_sessions import Sessions
from tests.zreal.testing.conftest import RankSessions

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.gloo

IMPORTED = zreal.backends, zreal.rank.run
"""Modules that a session would forget."""


def test_scenarios_run_on_real_ranks_and_only_a_failure_that_is_expected_passes(
    sessions: RankSessions
) -> None:
    own = Sessions(sessions.pytester)
    own.scenario("fsdp2-mlp-2")
    failure = {"kind": "failure", "rank": 1, "at": "backward blocks.0"}
    for name, rank in (("zero3-mlp-2-lookahead-0", 1), ("ddp-mlp-2", 0)):
        own.scenario(name, faults=[failure], expect={"ends": False, "at_fault": rank})
    result = own.run("scenarios", "--zero-backend=gloo", "--zero-timeout=60", "-v")
    result.stdout.fnmatch_lines([
        "*/ddp-mlp-2.toml::gloo FAILED*", "*/fsdp2-mlp-2.toml::gloo PASSED*",
        "*/zero3-mlp-2-lookahead-0.toml::gloo PASSED*",
        "at_fault: expected rank 0, found rank 1", "rank 1: *exited with code 86*",
    ])
    result.assert_outcomes(passed=2, failed=1)
