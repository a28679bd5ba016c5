"""With CI set, a test that was skipped because its server is missing fails the run.

A developer without some server still gets a useful run; the gate must not go green on tests that never ran.
The contract is the reason's wording: it starts with "no server:".
"""

from __future__ import annotations

import os

import pytest

PREFIX = "no server:"


class NoMissingServers:
    def __init__(self) -> None:
        self.skipped: list[tuple[str, str]] = []

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or not isinstance(report.longrepr, tuple | list):
            return
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(PREFIX):
            self.skipped.append((report.nodeid, reason))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.skipped:
            terminalreporter.section("skipped for want of a server, which CI does not allow", red=True)
            for where, reason in self.skipped:
                terminalreporter.line(f"{where}: {reason}")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI"):
        config.pluginmanager.register(NoMissingServers(), "no-missing-servers")
