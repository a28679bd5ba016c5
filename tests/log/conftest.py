from __future__ import annotations

import pytest

# The suites are not test files by name; their failures should tell as much as those of tests.
pytest.register_assert_rewrite("strandline.testing.logs", "strandline.testing.slots", "strandline.testing.stores")
