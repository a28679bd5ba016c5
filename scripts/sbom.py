"""Usage: sbom.py BOM LOCK: writes into a list of parts (CycloneDX, JSON) which part needs which.

cyclonedx-py lists the packages of a lock, but no dependencies. The lock has them: below each package, ``# via`` names
those that need it, and pyproject.toml is the project itself.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = re.compile(r"([A-Za-z0-9][\w.-]*)==")
_VIA: Final = re.compile(r"    # +(?:via +)?([A-Za-z0-9][\w.-]*)(?: \(pyproject\.toml\)|\[[\w,-]+\])?$")
"""A package that needs the one above; lines of constraint files do not match."""


def needed_by(lock: str) -> dict[str, set[str]]:
    """Of each package in a lock: the packages that need it, and the project, by their normalized names."""
    found: dict[str, set[str]] = {}
    name = ""
    for line in lock.splitlines():
        if package := _PACKAGE.match(line):
            name = _normalized(package[1])
            found.setdefault(name, set())
        elif (user := _VIA.match(line)) and user[1] != "via":
            found[name].add(_normalized(user[1]))
    return found


def with_dependencies(bom: dict[str, Any], lock: str) -> dict[str, Any]:
    """The list of parts, with the dependencies of each; ``ValueError`` if the lock names a part that is not listed."""
    root = bom["metadata"]["component"]
    references: dict[str, list[str]] = {_normalized(root["name"]): [root["bom-ref"]]}
    for part in bom["components"]:
        references.setdefault(_normalized(part["name"]), []).append(part["bom-ref"])
    needs: dict[str, set[str]] = {reference: set() for each in references.values() for reference in each}
    for name, users in needed_by(lock).items():
        unknown = sorted({name, *users} - references.keys())
        if unknown or not users:
            raise ValueError(f"{name} is needed by {sorted(users)}, and the list of parts lacks {unknown}")
        for user in users:
            for reference in references[user]:
                needs[reference].update(references[name])
    return {
        **bom,
        "dependencies": [
            {"ref": reference, **({"dependsOn": sorted(needed)} if needed else {})}
            for reference, needed in sorted(needs.items())
        ],
    }


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    path, lock_path = map(Path, sys.argv[1:])
    listed = with_dependencies(json.loads(path.read_text()), lock_path.read_text())
    path.write_text(json.dumps(listed, indent=2) + "\n")
