"""``python -m tests.pairs`` writes the table of pairs into docs/architecture.md."""

import tests.pairs.test_pairs
import tests.spark.datasource.test_every_log  # noqa: F401 - its rows
from tests.pairs.table import write

write()
