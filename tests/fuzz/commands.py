"""The command line: random arguments, addresses, files and input for each command, in this process and as processes.

A command ends with status 0, 1 or 2 and a sentence; whatever else it raises is a find.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer.testing
from typer.main import get_command

from strandline.cli.app import COMMANDS, app, imported_command
from strandline.errors import StrandlineError
from tests.fuzz.formats import TARGETS as DECODERS
from tests.fuzz.mutation import JSON_PIECES, JSON_VALUES, damage
from tests.fuzz.places import PLACES
from tests.fuzz.targets import Target, Try

_ENDLESS: Final = frozenset({"demo", "quickstart", "follow", "node run", "tier serve"})
"""These run until they are stopped, or take long on purpose."""
_WAITING: Final = frozenset({"--follow", "-f", "--watch", "--help", "-h", "--wait"})
_STATUSES: Final = frozenset({0, 1, 2})
_PLACES: Final = {place.name: place for place in PLACES}
_HOME: Final = "@"
"""Stands for the folder of a case, which is another one each time."""
# Nothing here may lead out of that folder, nor to another machine.
_ADDRESSES: Final = (
    *(f"{_HOME}/{name}" for name in _PLACES),
    *(f"file://{_HOME}/{name}" for name in _PLACES),
    f"wal://{_HOME}/wal-folder", f"{_HOME}/spool.logical.wal", f"{_HOME}/some.json", f"{_HOME}/none", f"{_HOME}/spool",
    "memory://", "memory://x", "grpc://127.0.0.1:1", "grpc://", "grpc://127.0.0.1:99999", "grpc+tls://127.0.0.1:1",
    "s3://", "gs://", "az://", "http://127.0.0.1:1", "file://", "x", "", " ", "\N{SNOWMAN}", "a" * 300, "x://y", "://",
)  # fmt: skip
_WORDS: Final = (
    "0", "1", "-1", "3", "1e9", "nan", "inf", "18446744073709551616", "9" * 40, "now", "beginning", "2024-01-01", "7d",
    "age:7d", "bytes:1GiB", "forever", "consumed", "latest", "1MiB", "-5s", "billing", "a,b", "k=v", "=", ":", "", "x",
    "zstd", "none", "log", "queue-v1", "quorum(a,b)", "00000000-0000-0000-0000-000000000007/0/3", "\ud800".encode(
        "utf-8", "replace").decode(), "\N{SNOWMAN}", "--", "offset,value", "json",
)  # fmt: skip
_PIECES: Final = (
    "?", "?a=b", "#x", "%00", "%2e%2e", "%", "%zz", "//", "/./", "\n", "\t", " ", "\x7f", "\N{SNOWMAN}", "é", ";", ":",
    "@x",    "user:secret@", "[", "[::1]", "\\", "*", "~", "$HOME", "'", '"', "a" * 300, "/" * 50, "?" + "x=1&" * 50,
)  # fmt: skip
"""What addresses are bent by."""
_FITTING: Final = (
    ("wal ", ["wal-folder", "wal-folder", "spool.logical.wal"]),
    ("segments ", ["tiered-log"]),
    ("tier ", ["tiered-log", "tiered-log", "object-log", "wal-folder"]),
    ("node reset-term", ["node-folder"]),
    ("upgrade", ["queue"]),
    ("", ["object-log", "object-log", "tiered-log"]),
)
"""What a command is for, by how its name begins."""


@cache
def _front() -> typer.Context:
    """What has the options that all commands share."""
    return typer.Context(get_command(app))


@cache
def _tree() -> dict[str, Any]:
    """All commands that end by themselves, by their names."""
    found: dict[str, Any] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        if hasattr(command, "commands"):
            for name, inner in command.commands.items():
                walk(inner, (*path, name))
        else:
            found[" ".join(path)] = command

    for name in COMMANDS:
        walk(imported_command(name), (name,))
    # Those of Spark are the same commands, and start a Java that the bounds on memory end.
    return {name: one for name, one in sorted(found.items()) if name not in _ENDLESS and not name.startswith("spark ")}


# --- what is given ---------------------------------------------------------------------------------------------


def _case(chance: random.Random) -> bytes:
    name = chance.choice(list(_tree()))
    command = _tree()[name]
    arguments = name.split()
    for parameter in command.get_params(typer.Context(command, parent=_front())):
        if parameter.param_type_name == "argument":
            if chance.random() < 0.95:
                arguments.append(_argument(name, parameter.name, chance))
        elif chance.random() < 0.2 and not _WAITING & {*parameter.opts}:
            arguments.append(chance.choice(parameter.opts))
            if not parameter.is_flag:
                arguments.append(_value(chance))
    if chance.random() < 0.1:
        arguments.insert(chance.randrange(len(arguments) + 1), chance.choice(_WORDS))
    meant = [place for place in PLACES if any(f"{_HOME}/{place.name}" in each for each in arguments)]
    return json.dumps(
        {
            "arguments": arguments,
            "forged": {place.name: place.forged(chance).hex() for place in meant if chance.random() < 0.7},
            "spool": _spool(chance).hex(),
            "input": _input(chance).hex(),
        }
    ).encode()


def _argument(command: str, name: str, chance: random.Random) -> str:
    """Where a command is pointed at: mostly a place that is there, and is of the right kind."""
    if name in ("url", "folder", "path", "log", "queue_url") and chance.random() < 0.8:
        fitting = next(names for start, names in _FITTING if command.startswith(start))
        place = f"{_HOME}/{chance.choice([*fitting * 4, *_PLACES])}"
        return place if chance.random() < 0.8 else f"file://{place}"
    if chance.random() < 0.3:
        return _bent(chance)
    return chance.choice(_ADDRESSES if chance.random() < 0.5 else _WORDS)


def _bent(chance: random.Random) -> str:
    """An address with pieces that no address should have. It leads to no other machine, and not out of the folder."""
    address = chance.choice([each for each in _ADDRESSES if "://" in each or each.startswith(_HOME)])
    is_far = address.startswith(("s3", "gs", "az", "http", "grpc"))
    for _ in range(chance.choice([1, 1, 2, 4])):
        piece = chance.choice([each for each in _PIECES if not is_far or "@" not in each])
        # The name of a machine stays as it is: nothing comes before it, nor makes what follows the name of one.
        at = address.find("://") + 3 if "://" in address and not is_far and chance.random() < 0.5 else len(address)
        address = address[:at] + piece + address[at:]
    return address


def _value(chance: random.Random) -> str:
    return chance.choice(_ADDRESSES if chance.random() < 0.15 else _WORDS)


def _spool(chance: random.Random) -> bytes:
    return next(target for target in DECODERS if target.name == "spool").make(chance)


def _input(chance: random.Random) -> bytes:
    """Lines, some of them records in JSON."""
    lines = []
    for _ in range(chance.randrange(5)):
        fields = {
            name: chance.choice(JSON_VALUES)
            for name in ("key", "value", "op", "headers", "timestamp")
            if chance.random() < 0.4
        }
        lines.append(chance.choice([json.dumps(fields).encode(), chance.choice(JSON_PIECES), b"a=b"]))
    data = bytearray(b"\n".join(lines))
    if chance.random() < 0.3:
        damage(data, chance, bytes(data), is_text=True)
    return bytes(data)


# --- how it is tried -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _home(root: Path, told: dict[str, Any]) -> Iterator[Path]:
    """A folder with logs of all kinds, some of them forged, to work in."""
    home = root / "home"
    before = Path.cwd()
    for name, place in _PLACES.items():
        if not any(f"/{name}" in str(each) for each in told["arguments"]):
            continue
        data = told["forged"].get(name)
        place.lay(home / name, b"" if data is None else bytes.fromhex(data))
    home.mkdir(exist_ok=True)
    (home / "spool.logical.wal").write_bytes(bytes.fromhex(told["spool"]))
    (home / "some.json").write_bytes(bytes.fromhex(told["input"]))
    os.chdir(home)
    try:
        yield home
    finally:
        os.chdir(before)
        shutil.rmtree(home)


def _in_process(arguments: list[str], given: bytes) -> str:
    result = typer.testing.CliRunner().invoke(app, arguments, input=given)
    error = result.exception
    is_asked = "--debug" in arguments and isinstance(error, (StrandlineError, OSError))
    if error is not None and not isinstance(error, SystemExit) and not is_asked:
        raise error
    assert is_asked or result.exit_code in _STATUSES, f"status {result.exit_code}: {result.output[-500:]}"
    assert "Traceback" not in result.output, result.output[-2000:]
    return "asked for" if is_asked else f"status {result.exit_code}"


def _as_process(arguments: list[str], given: bytes) -> str:
    if any("\0" in argument for argument in arguments):
        return "no case"
    done = subprocess.run(
        [sys.executable, "-m", "strandline.cli", *arguments], input=given, capture_output=True, check=False, timeout=90
    )
    told = (done.stdout + done.stderr).decode(errors="replace")
    assert "--debug" in arguments or "Traceback" not in told, told[-2000:]
    assert done.returncode in _STATUSES, f"status {done.returncode}: {told[-500:]}"
    return f"status {done.returncode}"


def _opened(work: Callable[[list[str], bytes], str]) -> Callable[[], contextlib.AbstractContextManager[Try]]:
    @contextlib.contextmanager
    def opened() -> Iterator[Try]:
        typer.testing._get_command = cache(get_command)
        for place in PLACES:
            place.files  # noqa: B018 - made before memory is bounded, and time counts
        with tempfile.TemporaryDirectory() as root:

            def attempt(case: bytes) -> str:
                try:
                    told = json.loads(case)
                    arguments, given = [str(each) for each in told["arguments"]], bytes.fromhex(told["input"])
                    stack = _home(Path(root), told)
                except (ValueError, KeyError, TypeError):
                    return "no case"
                with stack as home:
                    return work([each.replace(_HOME, str(home)) for each in arguments], given)

            yield attempt

    return opened


TARGETS = (
    Target("command-line", _case, _opened(_in_process), seconds=120.0),
    Target("command-processes", _case, _opened(_as_process), seconds=120.0),
)
