from __future__ import annotations

import pytest

# The suites are not test files by name; their failures should tell as much as those of tests.
SUITES = ("logs", "queues", "slots", "stores")
pytest.register_assert_rewrite(*(f"strandline.testing.{suite}" for suite in SUITES))
