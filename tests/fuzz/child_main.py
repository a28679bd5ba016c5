"""The child process of :mod:`tests.fuzz.runner`: its order is a JSON object in its argument."""

from __future__ import annotations

import json
import sys

from tests.fuzz.child import run
from tests.fuzz.registry import find


def main() -> int:
    order = json.loads(sys.argv[1])
    for name in order["names"]:
        if not run(find(name), order["seed"], cases=order["cases"], seconds=order["seconds"]):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
