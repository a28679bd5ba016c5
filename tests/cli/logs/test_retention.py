"""What a log may forget, from the shell."""

from __future__ import annotations

import json

import strandline as sl
from strandline.model.retention import MaxAge, SlotLimits
from tests.cli.conftest import Run


def test_a_log_says_what_it_keeps(run: Run, log: str) -> None:
    sl.open(log, create=True)
    shown = run("retention", log).stdout
    assert "keeps everything (forever)" in shown
    assert "Slots pin without a limit." in shown


def test_a_new_policy_comes_with_its_usual_limits(run: Run, log: str) -> None:
    sl.open(log, create=True)
    shown = run("retention", log, "age:7d").stdout
    assert "listed more than 7 d ago (age:7d)" in shown
    identity = sl.open(log).identity
    assert (identity.retention, identity.limits) == (MaxAge(7 * 86400), SlotLimits(lag_bytes=64 << 30))


def test_limits_are_changed_one_at_a_time(run: Run, log: str) -> None:
    sl.open(log, create=True, retention="age:1h")
    run("retention", log, "--slot-idle", "1h")
    fields = json.loads(run("retention", log, "--slot-lag", "0", "--json").stdout)
    assert (fields["retention"], fields["slot_lag_bytes"], fields["slot_idle_seconds"]) == ("age:1h", 0, 3600)
    assert sl.open(log).identity.limits == SlotLimits(0, 3600)


def test_a_policy_that_means_nothing_changes_nothing(run: Run, log: str) -> None:
    sl.open(log, create=True)
    done = run("retention", log, "age:7x")
    assert done.exit_code == 2
    assert "7x" in done.output
    assert run("retention", log, "sometimes").exit_code == 2
    assert str(sl.open(log).identity.retention) == "forever"


def test_a_log_that_is_not_there_is_one_sentence(run: Run, log: str) -> None:
    done = run("retention", log)
    assert done.exit_code == 1
    assert "There is no log" in done.stderr
