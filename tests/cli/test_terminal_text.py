"""Nothing that others have named reaches a terminal as anything but text, and no time or address breaks a command."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import strandline as sl
from strandline.cli.shared import output as show
from strandline.cli.shared.common import confirm, stop_on_signal
from strandline.cli.shared.logs import log_to_stderr
from strandline.cli.shared.options import SharedOptions, begin
from strandline.cli.shared.text import escaped
from strandline.errors import InvalidInput, StrandlineError
from strandline.log.topic.kafka import KafkaTopic
from strandline.model.addresses import refuse_credentials
from strandline.model.records import record_batch
from strandline.storage.objects.urls import open_store
from tests.matrix_cases import some

EVIL = "a\x1b[2J\x07\x9b31m\u202eb\x7f[red]c[/]"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(capsys) -> str:
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert RAW.search(text) is None, repr(text)
    return text


@pytest.mark.parametrize(
    "thing",
    [EVIL, Text(EVIL), Text.assemble(("name: ", "bold"), EVIL)],
    ids=["a text", "a styled text", "an assembled text"],
)
def test_a_console_escapes_what_a_terminal_would_obey_and_takes_no_markup(capsys, thing):
    show.out().print(thing)
    show.err().print(thing)
    assert shown(capsys).count("[red]c[/]") == 2


def test_a_table_escapes_its_cells_titles_and_columns(capsys):
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    show.out().print(table)
    assert shown(capsys).count("[red]c[/]") == 3


def test_errors_warnings_lines_and_documents_are_escaped(capsys):
    show.error(StrandlineError(f"Slot {EVIL} is gone."))
    show.warning(EVIL)
    show.line(EVIL)
    show.document({EVIL: EVIL})
    assert r"\x1b" in shown(capsys)


def test_a_document_is_still_the_same_value(capsys):
    value = {EVIL: [EVIL, "größe 日本 \U0001f600 \U000e0001 \ud800"[:-1], "\u2028"]}
    show.document(value)
    assert json.loads(capsys.readouterr().out) == value


def test_an_error_on_a_terminal_is_escaped_too(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    show.error(EVIL)
    text = capsys.readouterr().err
    assert "\x1b[2J" not in text
    assert "\x9b" not in text
    assert "[red]c[/]" in text


def test_a_progress_bar_takes_its_description_for_text():
    file = io.StringIO()
    console = show._Terminal(file=file, markup=False, force_terminal=True, width=120)
    with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
        bar.add_task(EVIL)
        bar.refresh()
    assert "\x1b[2Jb" not in file.getvalue()
    assert "a\x1b[2J" not in file.getvalue()
    assert r"a\x1b[2J" in file.getvalue()


def test_what_a_service_logs_is_escaped(capsys):
    log_to_stderr(logging.INFO)
    try:
        logging.getLogger("strandline.node").info("Node %s is gone.", EVIL)
        assert "Node a" in shown(capsys)
    finally:
        logging.getLogger("strandline").handlers.clear()


def test_a_question_is_escaped(monkeypatch):
    asked = []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, **_: asked.append(question) or True)
    confirm(f"Drop {EVIL}?", yes=False)
    assert RAW.search(asked[0]) is None


def test_header_names_keys_and_values_are_printed_as_text(run, log):
    with sl.open(log, create=True) as opened:
        batch = record_batch(
            timestamps=[1],
            ops=[sl.Op.PUT],
            keys=[EVIL.encode()],
            values=[EVIL.encode()],
            headers=[[(EVIL, EVIL.encode())]],
        )
        opened.append(batch, writer=sl.log.WriterId(opened.log_id), number=0).result(120)
    for more in ([], ["--json"]):
        done = run("tail", log, *more)
        assert done.exit_code == 0, done.output
        assert RAW.search(done.output) is None
        assert "[red]c[/]" in done.output


def test_a_path_with_control_characters_is_named_escaped(run, tmp_path):
    done = run("verify", tmp_path / "a\x1b[2Jb")
    assert done.exit_code == 1
    assert RAW.search(done.output) is None
    assert r"a\x1b[2Jb" in done.stderr


@pytest.mark.matrix
def test_a_traceback_is_escaped(tmp_path):
    command = [sys.executable, "-m", "strandline.cli", "verify", str(tmp_path / "a\x1b[2Jb"), "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert RAW.search(done.stderr) is None


# --- times -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "told"),
    [
        (2**63 - 1, 2**63 - 1),
        (-(2**63), -(2**63)),
        (0, "1970-01-01T00:00:00.000000Z"),
        (-62_135_596_800_000_001, -62_135_596_800_000_001),
    ],
)
def test_records_of_any_time_can_be_printed(run, log, time, told):
    with sl.open(log, create=True) as opened:
        batch = record_batch(timestamps=[time], ops=[sl.Op.PUT], keys=[b"k"], values=[b"v"])
        opened.append(batch, writer=sl.log.WriterId(opened.log_id), number=0).result(120)
    plain, lines = run("tail", log), run("tail", log, "--json")
    assert plain.exit_code == lines.exit_code == 0
    assert json.loads(lines.stdout)["timestamp"] == told
    assert plain.stdout.split()[1:3] == (["1970-01-01", "00:00:00.000"] if time == 0 else [str(time), "us"])


# --- credentials -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    some(
        [
            "s3://AKIA:verysecret@bucket/logs",
            "s3://AKIA:very/secret@bucket/logs",
            "gs://verysecret@bucket",
            "grpc://user:verysecret@127.0.0.1:7450",
            "kafka://user:verysecret@broker:9092/topic",
            "az://account:verysecret@container/logs",
            "unknown://user:verysecret@host",
            "s3://bucket/logs?X-Amz-Credential=AKIA&X-Amz-Signature=verysecret",
            "az://container/logs?sv=2024&sig=verysecret",
            "grpc://127.0.0.1:7450/?token=verysecret",
        ],
        3,
    ),
)
@pytest.mark.parametrize("command", ["verify", "tail", "doctor", "node status", "lag", "tier status", "produce"])
def test_an_address_with_credentials_is_refused_and_never_repeated(run, command, url):
    done = run(*command.split(), url, given="")
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    assert "credentials" in done.output
    assert "secret" not in done.output
    assert "AKIA" not in done.output


def test_the_remedy_is_named():
    with pytest.raises(InvalidInput, match="AWS_ACCESS_KEY_ID"):
        open_store("s3://key:secret@bucket")
    with pytest.raises(InvalidInput, match="token"):
        sl.node.RemoteLog("grpc://user:pw@127.0.0.1:1")
    for url in ("s3://key:secret@bucket/table", "s3://bucket/table?X-Amz-Signature=secret"):
        with pytest.raises(InvalidInput, match="storage options") as refused:
            sl.DeltaSink(url)
        assert "secret" not in str(refused.value)
    for url in ("nats://user:pw@host:4222", "user:pw@host:4222", "tls://pw@host", ["nats://host", "nats://pw@host"]):
        with pytest.raises(InvalidInput, match="user_credentials") as refused:
            sl.kv.NatsKeyValue.connect(url, "routes")
        assert "pw" not in str(refused.value)
    for bootstrap in ("user:pw@broker:9092", "broker:9092,user:pw@broker:9093"):
        with pytest.raises(InvalidInput, match=r"sasl\.username") as refused:
            KafkaTopic(bootstrap, "events", 1)
        assert "pw" not in str(refused.value)


def test_an_address_with_credentials_is_not_written_down_where_others_read_it(tmp_path):
    log = sl.open(tmp_path / "log", create=True)
    with pytest.raises(InvalidInput, match="credentials"):
        sl.tier.attach(log, "s3://key:secret@bucket/cold", f"file://{tmp_path}/events")
    assert not (tmp_path / "events").exists()
    assert isinstance(sl.open(tmp_path / "log"), sl.log.ObjectLog)
    with pytest.raises(InvalidInput, match="credentials"):
        sl.node.NodeConfig(folder="a", name="a", lead=True, url="grpc://user:secret@host:1")


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b",
        "file:///home/a@b",
        "/home/a:b@c",
        "abfss://c@account.dfs.core.windows.net/x",
        "grpc://[::1]:7450",
        "s3://bucket/secret/token=1",
        "https://host/a?versioned=1&page=2",
        "/data/a?token=b",
    ],
)
def test_an_address_without_credentials_is_left_alone(url):
    refuse_credentials(url, "")


# --- metrics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.1.2.3", "example.org"])
def test_metrics_on_another_interface_than_loopback_need_to_be_asked_for(run, tmp_path, host):
    done = run("node", "run", tmp_path / "a", "--name", "a", "--lead", "--create", "--metrics", f"{host}:0")
    assert done.exit_code == 1
    assert "--metrics-open" in done.stderr
    assert not (tmp_path / "a").exists()


def test_escaping_leaves_printable_text_alone():
    assert escaped("größe 日本 … ✓") == "größe 日本 … ✓"


def test_a_table_is_made_only_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    def table() -> str:
        raise AssertionError("made for nobody")

    begin(SharedOptions(json=True))
    show.answer({"term": 3}, table)
    assert capsys.readouterr().out == '{"term": 3}\n'
    begin(SharedOptions())
    show.answer({"term": 3}, "a line", lambda: "a table")
    assert capsys.readouterr().out == "a line\na table\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_command_whatever_its_main_thread_holds(number: signal.Signals) -> None:
    """A thread that waits for an event holds the event's lock for a moment, and a handler runs in that thread."""
    with stop_on_signal() as stop:
        with stop._cond:  # type: ignore[attr-defined]
            signal.raise_signal(number)
        assert stop.wait(30)
    with stop_on_signal() as other:
        assert not other.is_set()
