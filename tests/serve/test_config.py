"""The file of a server: settings, or one sentence with file, line and the nearest valid name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strandline.errors import Fenced, InvalidInput, NotFound
from strandline.serve.config.changes import PartName, changes, in_force
from strandline.serve.config.reading import parse_config, read_config
from strandline.serve.config.settings import Section, Settings
from strandline.serve.config.shown import shown_settings
from strandline.serve.config.values import Secret, revealed
from strandline.serve.own_folder import held_folder, running_process
from strandline.storage.disk import DISK
from strandline.storage.env import SYSTEM

WHOLE = """\
[process]
folder = "/var/lib/strandline"
drain = "10s"
[http]
listen = "[::1]:0"
origins = ["https://app.example", "*"]
[flight]
listen = "127.0.0.1:7460"
[security]
cert = "c.pem"
key = "k.pem"
client_ca = "ca.pem"
tokens = "tokens"
ca = "roots.pem"
token = "own"
[logs.orders]
address = "s3://bucket/orders"
create = true
options = { region = "eu", aws_secret_access_key = { env = "KEY" }, sse_customer_key = { file = "sse" } }
retention = "age:7d"
slot_lag = "64GiB"
slot_idle = "7d"
trim = "10m"
grace = 60
[logs.orders.cold]
store = "s3://cold/orders"
events = "s3://cold/events"
every = "1m"
target = "16MiB"
linger = "2h"
retention = "bytes:1TiB"
compact = true
[logs.payments]
address = "/var/lib/payments"
[logs.payments.node]
name = "a"
listen = "127.0.0.1:7461"
url = "grpc://db1:7461"
lease = "s3://bucket/lease"
lease_seconds = 5
automatic = true
policy = "quorum(a,b,c)"
nodes = { b = "grpc://db2:7461", c = "grpc://db3:7461" }
region = "eu"
[streams]
root = "s3://bucket/streams"
options = { region = "eu" }
[ingest.kafka]
source = "kafka://broker:9092/orders"
target = "orders"
slot = "s"
start = "retained"
skip_trimmed = true
config = { "sasl.password" = { env = "PASSWORD" }, "sasl.username" = "me" }
[tables.orders]
log = "orders"
sink = "s3://bucket/tables/orders"
follow = false
mode = "latest"
schema = "orders.json"
envelope = "debezium"
key = ["id"]
tombstones = "key"
partition_by = ["day(time)"]
cluster_by = ["city"]
upkeep = "24h"
dead_letters = "s3://bucket/tables/letters"
slot = "orders"
start = "2026-01-31T00:00:00Z"
options = { region = "eu" }
[tables.shop]
log = "orders"
sink = "s3://bucket/{name}/orders"
by = "header:table"
unrouted = "skip"
without = ["audit"]
names = "s3://bucket/names"
[snapshots.orders]
log = "orders"
publish = "s3://bucket/snapshots"
every = "12h"
kind = "rocksdb"
"""


def settings(text: str) -> Settings:
    return parse_config(text, "strandline.toml").settings


def test_every_setting_is_read() -> None:
    found = settings(WHOLE)
    assert found.process.drain == 10
    assert found.http.listen.place == ("::1", 0)
    assert found.http.origins == ("https://app.example", "*")
    assert found.flight.listen.place == ("127.0.0.1", 7460)
    assert (found.security.cert, found.security.token) == ("c.pem", "own")
    orders = found.logs["orders"]
    assert (orders.slot_lag, orders.slot_idle, orders.trim, orders.grace) == (64 << 30, 604800, 600, 60)
    assert orders.cold is not None
    assert (orders.cold.every, orders.cold.target, orders.cold.retention) == (60, 16 << 20, f"bytes:{1 << 40}")
    node = found.logs["payments"].node
    assert node is not None
    assert (node.lease_seconds, node.nodes["c"]) == (5, "grpc://db3:7461")
    assert found.ingest["kafka"].config["sasl.password"] == Secret(env="PASSWORD")
    assert found.tables["orders"].key == ("id",)
    assert not found.tables["orders"].follow
    assert (found.tables["shop"].by, found.tables["shop"].without) == ("header:table", ("audit",))
    assert found.snapshots["orders"].every == 43200


def test_the_text_with_every_setting_has_all_of_them() -> None:
    """A new setting has to be added to the text above, and so to this file's tests."""
    config = parse_config(WHOLE.replace('lease = "s3://bucket/lease"', 'lead = true\nupstream = "x"'), "x")
    names = {each.name.split(".", 2)[-1] for each in shown_settings(config, {}) if each.source != "default"}
    left = {each.name.split(".", 2)[-1] for each in shown_settings(config, {}) if each.source == "default"}
    assert left - names == {"raw"}, "schema excludes it; it has a case below"


WRONG = [
    pytest.param(
        'tokens = "tokens"\n',
        "",
        'origins = ["https',
        "every page that somebody opens could read and append: list origins, or give tokens.",
    ),
    *(
        pytest.param(
            '"https://app.example"',
            f'"{wrong}"',
            wrong,
            f"http.origins[0] cannot be used: {wrong!r} is no origin: write it as browsers do, such as",
        )
        for wrong in ("app.example", "https://app.example/", "https://App.example", "null", "https://*.example", "*x")
    ),
    pytest.param(
        'listen = "[::1]:0"',
        'lisen = "x:1"',
        'lisen = "x:1"',
        "[http] has no setting 'lisen': did you mean 'listen'?",
    ),
    pytest.param(
        "[http]",
        "[htp]",
        "[htp]",
        "there is no section [htp]: did you mean 'http'?",
    ),
    pytest.param(
        "compact = true",
        "compat = true",
        "compat = true",
        "[logs.orders.cold] has no setting 'compat': did you mean 'compact'?",
    ),
    pytest.param(
        'name = "a"',
        'nam = "a"',
        'nam = "a"',
        "[logs.payments.node] has no setting 'nam': did you mean 'name'?",
    ),
    pytest.param(
        'trim = "10m"',
        'trim = "10 minutes"',
        'trim = "10 minutes"',
        "logs.orders.trim cannot be used: '10 minutes' is not a time: use a number with s, m, h, d or w, such as 10m.",
    ),
    pytest.param(
        'trim = "10m"',
        "trim = true",
        "trim = true",
        "logs.orders.trim cannot be used: True is not a time such as '10m'.",
    ),
    pytest.param(
        'target = "16MiB"',
        'target = "16MB"',
        'target = "16MB"',
        "logs.orders.cold.target cannot be used: '16MB' is not a size: use a number with KiB",
    ),
    pytest.param(
        '"[::1]:0"',
        '"::1"',
        '"::1"',
        "http.listen cannot be used: '::1' is no address to listen on: write host:port, such as 127.0.0.1:7700.",
    ),
    pytest.param(
        'retention = "age:7d"',
        'retention = "7d"',
        'retention = "7d"',
        "logs.orders.retention cannot be used: '7d' is no retention policy: use 'forever'",
    ),
    pytest.param(
        'log = "orders"\nsink',
        'log = "order"\nsink',
        'log = "order"\nsink',
        "there is no log 'order' in this file: did you mean 'orders'?",
    ),
    pytest.param(
        'target = "orders"',
        'target = "ordres"',
        'target = "ordres"',
        "there is no log 'ordres' in this file: did you mean 'orders'?",
    ),
    pytest.param(
        'mode = "latest"',
        'mode = "last"',
        'mode = "last"',
        "tables.orders.mode cannot be used: Invalid enum value 'last': it is 'latest' or 'marked'",
    ),
    pytest.param(
        "follow = false",
        'follow = "no"',
        'follow = "no"',
        "tables.orders.follow cannot be used: expected `true or false`, got `text`.",
    ),
    pytest.param(
        'start = "2026-01-31T00:00:00Z"',
        'start = "soon"',
        'start = "soon"',
        "'soon' is neither 'beginning', 'retained' nor 'now', nor an offset, nor a time such as 2026-01-15T05:29:00Z.",
    ),
    pytest.param(
        '{ env = "KEY" }',
        '{ enf = "KEY" }',
        '{ enf = "KEY" }',
        "[logs.orders.options] has no setting 'enf': did you mean 'env'?",
    ),
    pytest.param(
        '{ env = "KEY" }',
        "{}",
        "{}",
        'logs.orders.options cannot be used: a secret is { env = "NAME" } or { file = "PATH" }.',
    ),
    pytest.param(
        "[tables.orders]",
        "[tables.'or ders']",
        "[tables.'or ders']",
        "'or ders' is no name: use letters, digits, '.', '_' and '-' in [tables.NAME].",
    ),
    pytest.param(
        "[tables.orders]",
        "[tables]",
        'log = "orders"\nsink',
        "'log' is no table: write [tables.NAME] above it.",
    ),
    pytest.param(
        "[http]",
        "[http.listen]\nx = 1",
        "[http.listen]",
        "http.listen cannot be used: it is a text.",
    ),
    pytest.param(
        'sink = "s3://bucket/tables/orders"\n',
        "",
        "[tables.orders]",
        "[tables.orders] needs the setting 'sink'.",
    ),
    pytest.param(
        'sink = "s3://bucket/tables/orders"',
        'sink = "postgresql://me:hidden@host/db#t"',
        'sink = "postgresql://me:hidden@host/db#t"',
        "The address postgresql://…@host has credentials",
    ),
    pytest.param(
        'address = "/var/lib/payments"',
        'address = "x"\ntrim = "1m"',
        'trim = "1m"',
        "trim is not for a node: its primary trims the log.",
    ),
    pytest.param(
        '"s3://bucket/orders"',
        '"wal:///x"',
        'retention = "age:7d"',
        "the process that writes a write-ahead log trims it: say how often by trim, such as '10m'.",
    ),
    pytest.param(
        "follow = false",
        "raw = true",
        "raw = true",
        "schema decodes values: leave out raw.",
    ),
    pytest.param(
        'schema = "orders.json"\n',
        "",
        'envelope = "debezium"',
        "the envelope is around rows: name their schema by schema.",
    ),
    pytest.param(
        'by = "header:table"',
        "",
        'unrouted = "skip"',
        "unrouted is for many tables: say by what, such as by = 'table'.",
    ),
    pytest.param(
        'by = "header:table"',
        'by = "column:x"',
        'by = "column:x"',
        "Names are in a field such as a.b, header:NAME or key:SEPARATOR, not in 'column:x'.",
    ),
    pytest.param(
        'sink = "s3://bucket/{name}/orders"',
        'sink = "s3://bucket/orders"',
        'sink = "s3://bucket/orders"',
        "with by, the tables' address has {name} where the name goes.",
    ),
    pytest.param(
        'sink = "s3://bucket/tables/orders"',
        'sink = "s3://bucket/{name}"',
        'sink = "s3://bucket/{name}"',
        "the address has {name}: say by 'by' where the names are.",
    ),
    pytest.param(
        'names = "s3://bucket/names"',
        "follow=false",
        "follow=false",
        "many tables are followed here, or not at all: leave out follow.",
    ),
    pytest.param(
        "[http]",
        "[http",
        None,
        "strandline.toml is no TOML: Expected ']' at the end of a table declaration (at line 4, column 6).",
    ),
]


@pytest.mark.parametrize(("old", "new", "where", "said"), WRONG)
def test_what_is_wrong_is_refused_with_its_line(old: str, new: str, where: str | None, said: str) -> None:
    text = WHOLE.replace(old, new, 1)
    if "wal:" in new:
        text = text.replace('trim = "10m"\n', "")
    with pytest.raises(InvalidInput) as refused:
        settings(text)
    place = "strandline.toml" if where is None else f"strandline.toml:{text[: text.index(where)].count(chr(10)) + 1}:"
    assert str(refused.value).startswith(f"{place} {said}" if where is not None else said)
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["trim = inf", "slot_lag = inf", "trim = 1e400", "grace = 1e10", f"slot_lag = {1 << 70}"]
)
def test_a_number_that_nothing_can_hold_or_wait_for_is_refused(setting: str) -> None:
    with pytest.raises(InvalidInput, match=r"strandline\.toml:3: logs\.a.* cannot be used: .* is not a"):
        settings(f'[logs.a]\naddress = "./a"\n{setting}\n')


def test_an_offset_of_thousands_of_digits_is_none() -> None:
    with pytest.raises(InvalidInput, match=r"strandline\.toml:4"):
        settings(f'[tables.a]\nlog = "./a"\nsink = "./t"\nstart = "{"9" * 5000}"\n')


@pytest.mark.parametrize("option", ["aws_secret_access_key", "sas_token", "account_key"])
def test_a_secret_is_not_written_in_the_file(option: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        settings(f'[logs.a]\naddress = "s3://b/a"\noptions.{option} = "hunter2"\n')
    assert str(refused.value).startswith(f"strandline.toml:3: {option} is a secret, and is not written here")
    assert "hunter2" not in str(refused.value)


def test_secrets_are_read_from_the_environment_and_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from the file\n")
    options = {"a": Secret(env="A"), "b": Secret(file=str(tmp_path / "secret")), "c": "plain"}
    assert revealed(options, {"A": "x"}, DISK) == {"a": "x", "b": "from the file", "c": "plain"}
    with pytest.raises(InvalidInput, match="no variable A"):
        revealed(options, {}, DISK)
    with pytest.raises(NotFound, match="missing"):
        revealed({"b": Secret(file=str(tmp_path / "missing"))}, {}, DISK)


def test_shown_settings_name_line_default_and_environment_and_no_secret() -> None:
    shown = {each.name: each for each in shown_settings(parse_config(WHOLE, "f.toml"), {"KEY": "hunter2"})}
    assert (shown["logs.orders.trim"].value, shown["logs.orders.trim"].source) == (600, "f.toml:23")
    assert shown["logs.payments.grace"].source == "default"
    secret = shown["logs.orders.options.aws_secret_access_key"]
    assert (secret.value, secret.source) == ("(hidden)", "the environment variable KEY, by f.toml:19")
    assert (
        shown["ingest.kafka.config.sasl.password"].source == "the environment variable PASSWORD (not set), by f.toml:54"
    )
    assert "hunter2" not in repr(shown)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="There is no file"):
        read_config(str(tmp_path / "x.toml"), DISK)
    (tmp_path / "b.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match="not UTF-8"):
        read_config(str(tmp_path / "b.toml"), DISK)
    with pytest.raises(InvalidInput, match="nested too deeply"):
        settings("x = " + "[" * 100_000)


# --- what changes without a restart ----------------------------------------------------------------------------


def changed(old: str, new: str, text: str = WHOLE) -> Any:
    assert old in text
    before, after = settings(text), settings(text.replace(old, new, 1))
    return changes(before, after), in_force(before, after)


def test_an_unchanged_file_changes_nothing() -> None:
    found, _ = changed("[http]", "# a comment\n[http]")
    assert (found.stop, found.start, found.restart) == ((), (), ())


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ('trim = "10m"', 'trim = "5m"', PartName("logs", "orders")),
        ('every = "1m"', 'every = "5m"', PartName("logs", "orders")),
        ("skip_trimmed = true\n", "", PartName("ingest", "kafka")),
        ("follow = false", "follow = true", PartName("tables", "orders")),
        ('every = "12h"', 'every = "6h"', PartName("snapshots", "orders")),
    ],
)
def test_a_part_that_changed_is_stopped_and_started_again(old: str, new: str, part: PartName) -> None:
    found, force = changed(old, new)
    assert (found.stop, found.start, found.restart) == ((part,), (part,), ())
    assert force == settings(WHOLE.replace(old, new, 1))
    assert found.lines() == [f"{part} is changed"]


def test_parts_are_added_and_removed() -> None:
    more = '[tables.more]\nlog = "orders"\nsink = "./t"\n'
    assert changed("[snapshots.orders]", more + "[snapshots.orders]")[0].lines() == ["tables.more is added"]
    removed, _ = changed(more, "", WHOLE + more)
    assert (removed.stop, removed.start) == ((PartName("tables", "more"),), ())
    assert removed.lines() == ["tables.more is removed"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('listen = "[::1]:0"', 'listen = "[::1]:1"', "[http] is changed"),
        ('tokens = "tokens"', 'tokens = "others"', "[security] is changed"),
        ('address = "s3://bucket/orders"', 'address = "s3://bucket/other"', "[logs.orders] has another address"),
        ('region = "eu", aws', 'region = "us", aws', "[logs.orders] has another address"),
        ("lease_seconds = 5", "lease_seconds = 6", "[logs.payments] has another address, node or store"),
    ],
)
def test_what_needs_a_restart_is_said_and_stays_as_it_was(old: str, new: str, said: str) -> None:
    found, force = changed(old, new)
    assert (found.stop, found.start) == ((), ())
    assert [line.startswith(said) for line in found.restart] == [True]
    assert force == settings(WHOLE)


# --- its own folder --------------------------------------------------------------------------------------------


def test_a_folder_has_one_server_which_is_named_to_a_second_one(tmp_path: Path) -> None:
    folder = str(tmp_path / "own")
    assert running_process(folder, DISK) is None
    with held_folder(folder, SYSTEM):
        named = r"in use by process \d+, which runs since 20\d\d-.* UTC: stop that server"
        with pytest.raises(Fenced, match=named), held_folder(folder, SYSTEM):
            pass
        assert running_process(folder, DISK) is not None
    assert running_process(folder, DISK) is None
    with held_folder(folder, SYSTEM):
        pass


# --- the reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", Section.__subclasses__(), ids=lambda kind: kind.__name__)
def test_the_reference_has_every_setting(section: type[Section]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serve.md").read_text()
    missing = [name for name in section.__struct_fields__ if f"`{name}`" not in page and f"`[{name}" not in page]
    if section is not Settings:
        missing = [name for name in missing if f"`[logs.NAME.{name}]`" not in page]
    assert missing == []
