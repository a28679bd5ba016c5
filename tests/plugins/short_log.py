"""With CI set, a run prints a line for every thousand tests, and each failure when it happens.

A shortened log of CI has no room for a row of dots for every 72 of 20,000 tests and for the reason of a failure, and
a run that is stopped never comes to its summary.
"""

from __future__ import annotations

import os

import pytest

EVERY = 1000


class ShortLog:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter
        self._ended = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
        return ("passed", "", "") if report.when == "call" and report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._reporter.write_line(f"\nFAILED in {report.when}: {report.nodeid}\n{report.longreprtext}")
        if report.when == "call":
            self._ended += 1
            if self._ended % EVERY == 0:
                self._reporter.write_line(f"{self._ended} tests have ended")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and isinstance(reporter, pytest.TerminalReporter) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ShortLog(reporter), "short-log")
