"""``sl.open``: every kind of log by its address, and one sentence for everything else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Fenced, InvalidInput, NotALog, WrongKind
from strandline.log.contract import Log
from tests.contracts.logs import append, content


def test_a_folder_of_a_write_ahead_log_is_opened_for_writing_by_one_and_for_reading_by_others(tmp_path: Path) -> None:
    url = f"wal://{tmp_path}/orders%20of%20today"
    with pytest.raises(NotALog):
        sl.open(url)
    with sl.open(url, create=True) as log:
        assert isinstance(log, Log)
        append(log, b"a", number=0)
        assert (tmp_path / "orders of today").is_dir()
        with pytest.raises(Fenced, match="open it for reading"):
            sl.open(url)
        with sl.open(url, read_only=True) as reader:
            assert content(reader) == [(0, b"a")]
            with pytest.raises(sl.errors.Unsupported, match="opened for reading"):
                append(reader, b"b", number=1)
    with sl.open(url) as again:
        assert content(again) == [(0, b"a")]


def test_a_write_ahead_log_with_a_cold_tier_is_read_across_both_and_closed_with_it(tmp_path: Path) -> None:
    url = f"wal://{tmp_path}/orders"
    with sl.open(url, create=True) as log:
        for number in range(4):
            append(log, b"%d" % number, number=number)
        sl.tier.attach(log, (tmp_path / "cold").as_uri())
        with sl.tier.tiering(log) as tierer:
            tierer.run_once(everything=True)
        assert log.trim(3) == 3
    for _ in range(2):  # the first one lets go of the folder when it is closed
        with sl.open(url) as both:
            assert isinstance(both, sl.tier.TieredLog)
            assert [value for _, value in content(both)] == [b"0", b"1", b"2", b"3"]
    with sl.open(url, read_only=True) as reader:
        assert [value for _, value in content(reader)] == [b"0", b"1", b"2", b"3"]


def test_a_program_that_does_not_close_a_log_with_a_cold_tier_ends(tmp_path: Path) -> None:
    """Its threads are frozen when the interpreter shuts down: nothing may wait for them."""
    log = sl.open(tmp_path / "orders", create=True)
    for number in range(4):
        append(log, b"%d" % number, number=number)
    sl.tier.attach(log)
    with sl.tier.tiering(log) as tierer:
        tierer.run_once(everything=True)
    log.slots.create("reader", 4)
    log.trim()
    program = (
        f"import strandline as sl; log = sl.open({str(tmp_path / 'orders')!r}); print(sl.bulk.verify(log).bounds.next)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "4\n"


def test_a_node_is_opened_by_its_address(tmp_path: Path) -> None:
    with sl.node.Primary.open(tmp_path / "node") as primary, sl.open(primary.url) as log:
        assert isinstance(log, Log)
        append(log, b"a", number=0)
        assert content(log) == content(primary) == [(0, b"a")]


@pytest.mark.parametrize(
    ("url", "options", "sentence"),
    [
        ("grcp://db1:7001", {}, r"There are no logs at grcp://: did you mean grpc://\?$"),
        ("ftp://db1/orders", {}, r"There are no logs at ftp://: use s3://, .*wal://, grpc://, grpc\+tls://\.$"),
        ("wal://orders", {}, r"'wal://orders' names no folder of this machine: write wal:///absolute/path\.$"),
        ("wal:///", {}, r"names no folder of this machine"),
        ("grpc://db1", {}, r"is no address of a node: use grpc://host:port"),
        ("grpc://db1:7001", {"create": True}, r"create= is for a log that this process creates, not for grpc://\.$"),
        ("grpc://db1:7001", {"retention": "consumed"}, r"retention= is for an object log, not for grpc://\.$"),
        ("wal:///srv/orders", {"retention": "consumed"}, r"retention= is for an object log, not for wal://\.$"),
        ("wal:///srv/orders", {"security": sl.node.ClientSecurity()}, r"security= is for a node \(grpc://\)"),
        ("memory://orders", {"read_only": True}, r"read_only= is for a write-ahead log \(wal://\), not for memory://"),
        ("memory://orders", {"format": "queue-v9"}, r"format is "),
        ("wal:///srv/orders", {"read_only": True, "create": True}, r"create= is for the process that writes"),
        (7, {}, r"address is "),
        (b"memory://x", {}, r"address is "),
        ("memory://x", {"create": "yes"}, r"create is "),
    ],
)
def test_a_failed_opening_is_reported_in_one_sentence(url: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        sl.open(url, **options)


def test_a_path_is_an_object_log_and_something_else_there_is_named(tmp_path: Path) -> None:
    assert sl.open(tmp_path / "objects", create=True).bounds().next == 0
    sl.open(f"wal://{tmp_path}/wal", create=True).close()
    with pytest.raises(WrongKind, match="write-ahead log"):
        sl.open(tmp_path / "wal")
    with pytest.raises(WrongKind, match="object log"):
        sl.open(f"wal://{tmp_path}/objects")


def test_help_shows_every_argument() -> None:
    shown = inspect.signature(sl.open).parameters
    assert {"create", "read_only", "retention", "limits", "options", "security", "read_from"} <= set(shown)
    assert all(f"{name}: " in (sl.open.__doc__ or "") for name in shown)
