"""The page on security names the limits that a node has."""

import re
from dataclasses import asdict
from pathlib import Path

from strandline.node.flight.server.limits import ServerLimits

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
UNITS = {"": 1, " MiB": 1 << 20}


def test_the_table_of_limits_has_every_limit_of_a_node_with_its_default() -> None:
    section = PAGE.read_text().split("## Limits\n", 1)[1].split("\n## ", 1)[0]
    told: dict[str, float] = {}
    for names, defaults in re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|", section, re.MULTILINE):
        values = re.findall(r"([\d,.]+?)( MiB)?(?:, |$)", defaults)
        told |= {
            name: float(number) * UNITS[unit]
            for name, (number, unit) in zip(re.findall(r"`(\w+)`", names), values, strict=True)
        }
    assert told == asdict(ServerLimits())
