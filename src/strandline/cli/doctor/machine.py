"""This machine: Python, the packages, the extras, and Java."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from operator import eq, ge, gt, le, lt, ne
from typing import Final

from strandline.cli.doctor.lines import Line, ok, problem, warning
from strandline.errors import MissingExtra

_OLDEST_PYTHON: Final = (3, 11)
_JAVA: Final = (17, 21)
_PURPOSES: Final = {
    "cli": "the command line",
    "delta": "Delta tables",
    "http": "serving streams over HTTP",
    "iceberg": "Iceberg tables",
    "kafka": "topics and cold-tier events in Kafka",
    "nats": "key-value stores and streams in NATS",
    "postgres": "PostgreSQL tables",
    "rocksdb": "state in RocksDB",
    "server": "serving a node",
    "spark": "Spark's data source and pipelines",
    "typed": "values in JSON, MessagePack, Avro and Protobuf",
}
"""What each extra is for."""
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_BOUND: Final = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9.]+)")
_SIGNS: Final = {">=": ge, "<=": le, "==": eq, "!=": ne, "<": lt, ">": gt}
_JAVA_VERSION: Final = re.compile(r'version "([0-9]+)')


@dataclass(frozen=True, slots=True)
class Requirement:
    """A required package with its version range; of an extra, or (None) always."""

    name: str
    versions: str
    extra: str | None

    def state(self) -> tuple[str, bool | None]:
        """Its name with the installed version, and whether that fits; None if it is not installed."""
        try:
            found = metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return self.name, None
        return f"{self.name} {found}", fits(found, self.versions)


def machine() -> Iterator[Line]:
    """All checks of this machine."""
    running = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= _OLDEST_PYTHON:
        yield ok("Python", f"{running} on {platform.system()} {platform.machine()}")
    else:
        yield problem("Python", f"{running} is too old: use Python 3.11 or newer.")
    needed = list(requirements())
    yield packages([one for one in needed if one.extra is None])
    yield checksums()
    for extra, purpose in _PURPOSES.items():
        yield of_extra(extra, purpose, [one for one in needed if one.extra == extra])
    yield java(wanted=all(one.state()[1] is not None for one in needed if one.name == "pyspark"))


def requirements() -> Iterator[Requirement]:
    """The requirements in the package's own metadata."""
    for text in metadata.requires("strandline") or []:
        found = _REQUIREMENT.fullmatch(text.strip())
        if found is None:
            continue
        extra = _EXTRA.search(found[3] or "")
        yield Requirement(found[1], found[2].strip(" ()"), None if extra is None else extra[1])


def fits(version: str, wanted: str) -> bool:
    """Whether a version is within bounds, for bounds of plain numbers.

    >>> fits("26.0.1", "<27,>=24"), fits("27.0", "<27,>=24"), fits("1.7", ">=1.7.0")
    (True, False, True)
    """
    return all(_SIGNS[sign](_numbers(version), _numbers(bound)) for sign, bound in _BOUND.findall(wanted))


def _numbers(version: str) -> tuple[int, ...]:
    parts = tuple(int(part) for part in re.findall(r"[0-9]+", version.partition("+")[0])[:3])
    return (*parts, 0, 0, 0)[:3]


def packages(needed: list[Requirement]) -> Line:
    """The required packages."""
    states = [(one, *one.state()) for one in needed]
    wrong = [f"{name} (needs {one.versions})" for one, name, fit in states if not fit]
    if wrong:
        return problem("packages", f"{', '.join(wrong)}: run pip install --upgrade strandline.")
    return ok("packages", ", ".join(["strandline " + metadata.version("strandline"), *(name for _, name, _ in states)]))


def checksums() -> Line:
    """Whether checksums are computed by the processor."""
    import google_crc32c

    if google_crc32c.implementation == "c":
        return ok("checksums", "CRC32C at hardware speed")
    message = "google-crc32c runs in plain Python, which is slow: install a build with its C extension."
    return warning("checksums", message)


def of_extra(extra: str, purpose: str, needed: list[Requirement]) -> Line:
    """An extra: installed, not installed (which is fine), or incomplete."""
    what = f"extra {extra}"
    states = [(one, *one.state()) for one in needed]
    install = f"pip install 'strandline[{extra}]'"
    if states and all(fit is None for *_, fit in states):
        return ok(what, f"not installed; only {purpose} would need it: {install}")
    wrong = [f"{name} (needs {one.versions})" for one, name, fit in states if not fit]
    if wrong:
        return warning(what, f"{', '.join(wrong)}: for {purpose} run {install}.")
    return ok(what, ", ".join(name for _, name, _ in states))


def java(*, wanted: bool) -> Line:
    """The Java that Spark would start."""
    if not wanted:
        return ok("Java", "not needed without the extra spark")
    from strandline.spark.session import find_java

    try:
        path = find_java()
        done = subprocess.run([path, "-version"], capture_output=True, text=True, check=False, timeout=60)
    except (MissingExtra, OSError, subprocess.TimeoutExpired) as error:
        return problem("Java", str(error))
    version = _JAVA_VERSION.search(done.stderr + done.stdout)
    if version is None:
        return problem("Java", f"{path} does not say its version: point JAVA_HOME at Java 17 or 21.")
    if int(version[1]) not in _JAVA:
        message = f"{path} is Java {version[1]}, and Spark needs 17 or 21: install one, or point JAVA_HOME at it."
        return problem("Java", message)
    return ok("Java", f"{version[1]} at {path}")
