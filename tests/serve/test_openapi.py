"""The OpenAPI document, against the server that it describes: generated requests, right ones and wrong ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Serve, append
from tests.serve.test_api import token
from tests.serve.test_parts import LOG, TABLE

TOKENS = '[security]\ntokens = "tokens"\n'

SLOTS = "POST /v1/logs/{log}/slots"
ANSWERS = 'checks.positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "409"]'
KNOWN = f"""
[parameters]
"path.log" = "orders"
"path.section" = "tables"
"path.name" = "orders"
[[operations]]
include-name = "{SLOTS}"
{ANSWERS}
[[operations]]
include-name = "{SLOTS}/{{slot}}/reset"
parameters."path.slot" = "moved"
{ANSWERS}
[[operations]]
include-name = "POST /v1/logs/{{log}}/retention"
{ANSWERS}
"""
"""Names that are there. Which offsets a log has, and how a retention is written, is no matter of a schema: others are
400."""


@pytest.mark.matrix
@pytest.mark.parametrize("with_tokens", [False, True])
def test_generated_requests_are_answered_as_the_document_says(
    serve: Serve, orders: Any, tmp_path: Path, *, with_tokens: bool
) -> None:
    append(orders, b"1", b"2")
    orders.slots.create("moved", 0)
    (tmp_path / "tokens").write_text(f"ops admin {token('ops')}\n")
    (tmp_path / "schemathesis.toml").write_text(KNOWN)
    running = serve(LOG + TABLE + (TOKENS if with_tokens else ""))
    running.until_works("tables", "orders")
    more = ["--header", f"Authorization: Bearer {token('ops')}"] if with_tokens else []
    done = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"), "run", f"{running.url}/v1/openapi.json", *more,
            "--max-examples=25", "--seed=1", "--generation-database=none", "--no-color", "--continue-on-failure",
            "--exclude-checks=ensure_resource_availability",  # a dry run answers 200, and creates nothing
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert running.ask("/healthz") == (200, "ok\n")
