"""The commands and programs of the pages, run as they stand."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.certificates import make_certificates, sign
from tests.docs.pages import HOME, Block, Page, PageFailed, agrees, blocks
from tests.postgres import PostgresServer
from tests.servers import BUCKET, AzureServer, KafkaServer, S3Server, fresh_prefix

DOCS = HOME / "docs"


def of_kind(*kinds: str) -> set[str]:
    """The pages that have such blocks."""
    pages = {str(path.relative_to(DOCS)): blocks(path.read_text()) for path in DOCS.rglob("*.md")}
    return {name for name, found in pages.items() if any(block.kind in kinds for block in found)}


ON_SERVERS = {f"howto/{name}.md" for name in ("s3", "gcs", "azure", "kafka", "nats", "tables")}
ON_SERVERS |= {"storage.md", "topics.md", "ingest.md", "key-value.md"}
"""Pages that have a test of their own, which brings a server."""
WITH_CERTIFICATES = {"replication.md", "flight.md"}
WITH_SPARK = {"tutorial/spark.md", "cli.md"}
IN_A_SESSION = {"spark.md", "cold-tier.md"}
"""Pages whose programs find a session: tests/spark/test_pages.py."""
ON_A_CLUSTER = {"spark-clusters.md"}
"""Also in tests/spark/test_pages.py."""
OTHERS = of_kind("terminal", "program") - ON_SERVERS - WITH_CERTIFICATES - WITH_SPARK - IN_A_SESSION - ON_A_CLUSTER
FIRST = {"index.md", "tutorial/table.md", "tutorial/service.md"}
"""Pages that `make test` runs; `make test-matrix` runs the others."""
PORTS = ("7001", "7700", "7800", "7007", "7451", "7452", "7453")


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def opened(name: str, folder: Path, **options: object) -> Page:
    page = Page(DOCS / name, folder, **options)
    page.instead |= {port: free_port() for port in PORTS if port in page.text}
    return page


def run(name: str, folder: Path, **options: object) -> None:
    opened(name, folder, **options).run()


def cases(names: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in sorted(names)]


@pytest.mark.parametrize("name", cases(OTHERS))
def test_a_page_does_what_it_shows(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.spark
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_page_on_commands_does_what_it_shows(tmp_path: Path) -> None:
    run("cli.md", tmp_path)


@pytest.mark.spark
@pytest.mark.matrix
@pytest.mark.timeout(1800)
def test_the_second_tutorial_goes_on_in_the_folder_of_the_first(tmp_path: Path) -> None:
    run("tutorial/table.md", tmp_path)
    run("tutorial/spark.md", tmp_path)


@pytest.mark.matrix
def test_the_page_on_s3_works_on_a_server(s3_server: S3Server, tmp_path: Path) -> None:
    known = s3_server.environment
    shown = {
        "s3://bucket": s3_server.url(BUCKET, fresh_prefix()),
        "eu-north-1": known["AWS_REGION"],
        "AKIAEXAMPLE": known["AWS_ACCESS_KEY_ID"],
        "example-secret": known["AWS_SECRET_ACCESS_KEY"],
    }
    run("howto/s3.md", tmp_path, instead=shown, environment=known)


@pytest.mark.matrix
def test_the_page_on_stores_works_on_a_server(s3_server: S3Server, tmp_path: Path) -> None:
    known = s3_server.environment
    shown = {
        "s3://bucket": s3_server.url(BUCKET, fresh_prefix()),
        "http://127.0.0.1:9000": known["AWS_ENDPOINT_URL"],
        "us-east-1": known["AWS_REGION"],
        "example-key": known["AWS_ACCESS_KEY_ID"],
        "example-secret": known["AWS_SECRET_ACCESS_KEY"],
    }
    run("storage.md", tmp_path, instead=shown, environment=known)


@pytest.mark.matrix
def test_the_page_on_azure_works_on_the_emulator(azure_server: AzureServer, tmp_path: Path) -> None:
    known = azure_server.environment
    shown = {
        "az://container": azure_server.url(BUCKET, fresh_prefix()),
        "NAME=myaccount": f"NAME={known['AZURE_STORAGE_ACCOUNT_NAME']}",
        "bXkta2V5": known["AZURE_STORAGE_ACCOUNT_KEY"],
    }
    run("howto/azure.md", tmp_path, instead=shown, environment=known)


@pytest.mark.matrix
def test_the_page_on_google_works_on_a_folder(tmp_path: Path) -> None:
    run("howto/gcs.md", tmp_path, instead={"gs://bucket": f"file://{tmp_path}/bucket"})


def topic_with_two(server: KafkaServer) -> str:
    """A topic of one partition that has two messages."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"orders-{uuid4().hex}"
    client = {"bootstrap.servers": server.bootstrap}
    admin = AdminClient(client)  # its answers end with it
    admin.create_topics([NewTopic(topic, 1)])[topic].result(60)
    producer = Producer(client)
    for key in ("o-1", "o-2"):
        producer.produce(topic, key=key, value="new", partition=0)
    assert producer.flush(60) == 0
    return topic


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["howto/kafka.md", "ingest.md"])
def test_a_page_on_kafka_works_on_a_broker(name: str, kafka_server: KafkaServer, tmp_path: Path) -> None:
    run(name, tmp_path, instead={"broker:9092/orders": f"{kafka_server.bootstrap}/{topic_with_two(kafka_server)}"})


@pytest.mark.matrix
def test_the_page_on_topics_works_on_a_broker(kafka_server: KafkaServer, tmp_path: Path) -> None:
    shown = {
        "broker-1:9092,broker-2:9092": kafka_server.bootstrap,
        "segment-events": f"segment-events-{uuid4().hex}",
        '"SSL"': '"PLAINTEXT"',
    }
    run("topics.md", tmp_path, instead=shown)


@pytest.mark.matrix
def test_the_page_on_nats_works_on_a_server(nats_url: str, tmp_path: Path) -> None:
    import nats

    suffix = uuid4().hex

    async def fill() -> None:
        connection = await nats.connect(nats_url)
        stream = connection.jetstream()
        await stream.add_stream(name=f"ORDERS{suffix}", subjects=["orders.*"])
        for number in (1, 2):
            await stream.publish(f"orders.{number}", b"new")
        await connection.close()

    asyncio.run(fill())
    shown = {"ORDERS": f"ORDERS{suffix}", '"routes"': f'"routes{suffix}"', "nats://host:4222": nats_url}
    run("howto/nats.md", tmp_path, instead=shown)


@pytest.mark.matrix
def test_the_page_on_key_value_stores_works_on_a_server(nats_url: str, tmp_path: Path) -> None:
    run("key-value.md", tmp_path, instead={'"routes"': f'"routes{uuid4().hex}"', "nats://host:4222": nats_url})


@pytest.mark.matrix
def test_the_page_on_tables_works_on_a_database(postgres: PostgresServer, tmp_path: Path) -> None:
    postgres.query("CREATE SCHEMA shop")
    known = {name: value for name, value in postgres.environment.items() if name.startswith("PG")}
    tools = Path(postgres.tool("psql")).parent
    shown = {
        "postgresql://host/database": "postgresql:///postgres",
        "PGUSER=me": f"PGUSER={postgres.user}",
        "psql --host host database": f"{tools}/psql postgres",
    }
    run("howto/tables.md", tmp_path, instead=shown, environment=known)


@pytest.mark.matrix
def test_the_page_on_replication_works_on_one_machine(tmp_path: Path) -> None:
    shown = {f"10.0.0.{number}": "127.0.0.1" for number in (1, 2, 3)}
    page = opened("replication.md", tmp_path, instead=shown)
    make_certificates(page.home)
    for name in ("a", "b", "c", "ops"):
        sign(page.home, name, f"DNS:{name},IP:127.0.0.1")
    page.run()


@pytest.mark.matrix
def test_the_page_on_flight_works_on_one_machine(tmp_path: Path) -> None:
    shown = {"/data": f"{tmp_path}/data", "0.0.0.0": "127.0.0.1", "node-1": "localhost"}
    page = opened("flight.md", tmp_path, instead=shown)
    make_certificates(page.home)
    page.run()


def page_of(text: str, folder: Path) -> Page:
    path = folder / "page.md"
    path.write_text(text)
    return Page(path, folder)


def test_other_output_than_the_page_shows_is_found(tmp_path: Path) -> None:
    with pytest.raises(PageFailed, match="should print:\na\nprinted:\nb"):
        page_of("```console\n$ echo b\na\n```\n", tmp_path).run()


def test_files_folders_and_variables_last_from_command_to_command(tmp_path: Path) -> None:
    text = '```text title="a/b.txt"\nhere\n```\n```console\n$ cd a && export WHAT=b.txt\n$ cat $WHAT\nhere\n```\n'
    page_of(text, tmp_path).run()


def test_a_program_goes_on_in_its_terminal_until_a_key_is_pressed(tmp_path: Path) -> None:
    text = (
        '```console title="one"\n$ echo runs; echo more; sleep 1000\nruns\n```\n'
        "```console\n$ echo meanwhile\nmeanwhile\n```\n"
        '```console title="one"\n^C\n$ echo free\nfree\n```\n'
    )
    page_of(text, tmp_path).run()


def test_a_program_that_ends_too_early_is_found(tmp_path: Path) -> None:
    with pytest.raises(PageFailed, match="should print"):
        page_of('```console title="one"\n$ echo starts\nstarts\nruns\n```\n', tmp_path).run()


def test_numbers_that_do_not_vary_must_agree() -> None:
    assert agrees("4 records in 0.3 s", ["4 records in 1.0 s"])
    assert not agrees("4 records in 0.3 s", ["5 records in 0.3 s"])


def test_a_program_of_a_page_that_raises_is_found(tmp_path: Path) -> None:
    page_of("```python\na = 1\n```\n<!-- >>> assert a == 1 -->\n", tmp_path).run()
    (tmp_path / "again").mkdir()
    with pytest.raises(PageFailed, match="ZeroDivisionError"):
        page_of("```python\na = 0\n```\n```python\n1 / a\n```\n", tmp_path / "again").run()


def test_a_hidden_command_goes_on_in_its_terminal_until_a_key_is_pressed(tmp_path: Path) -> None:
    text = (
        "<!-- [server] $ touch up; sleep 1000 -->\n<!-- $ until [ -e up ]; do sleep 0.01; done -->\n"
        "```console\n$ echo meanwhile\nmeanwhile\n```\n<!-- [server] ^C -->\n"
        '```console title="server"\n$ echo free\nfree\n```\n'
    )
    page_of(text, tmp_path).run()


def test_what_a_worker_of_spark_says_when_its_session_stops_is_not_compared() -> None:
    frame = '  File "/x/pyspark.zip/pyspark/daemon.py", line 95, in worker\n'
    noise = f"Traceback (most recent call last):\n{frame}{frame}BrokenPipeError: [Errno 32] Broken pipe\n"
    assert agrees(f"done\n{noise}", ["done"])
    assert not agrees("done\nTraceback (most recent call last):\nValueError: no\n", ["done"])


NOT_RUN = 19
"""How many blocks nothing runs. Each says why, above it: ``<!-- not run: REASON -->``."""


def examples() -> Iterator[tuple[Path, Block]]:
    """All fenced blocks that a reader may try."""
    for path in [HOME / "README.md", HOME / "CONTRIBUTING.md", *DOCS.rglob("*.md"), *(HOME / "examples").rglob("*.md")]:
        for block in blocks(path.read_text()):
            yield path, block


def test_every_example_is_run_or_says_why_it_is_not() -> None:
    for path, block in examples():
        assert block.kind or block.not_run, f"{path.name}: {block.body.splitlines()[0]}"
    assert len([block for _, block in examples() if block.not_run]) <= NOT_RUN


def test_a_block_that_looks_like_a_fence_is_one() -> None:
    """A fence that is indented, or made of other marks, would be seen by nobody."""
    for path in {path for path, _ in examples()}:
        fences = re.findall(r"^\s*(?:`{3,}|~{3,})", path.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(path.read_text())), path.name


def test_every_page_with_commands_or_programs_has_a_test() -> None:
    """The README's programs are run by ``test_readme``, and by that of ``tests/spark``."""
    tested = ON_SERVERS | WITH_CERTIFICATES | WITH_SPARK | IN_A_SESSION | ON_A_CLUSTER
    assert tested | OTHERS == of_kind("terminal", "program")
    assert OTHERS >= FIRST
    assert not {path.name for path, block in examples() if block.kind in {"terminal", "program"}} & {"CONTRIBUTING.md"}


def test_every_file_of_a_page_is_used() -> None:
    """A file that no later command, program or file names would only look as if it was run."""
    for path in {path for path, _ in examples()}:
        text = path.read_text()
        for block in blocks(text):
            if block.kind == "file":
                rest, name = text[block.start + len(block.body) :], Path(block.title)
                shown = "".join(later.body for later in blocks(rest)) + "".join(
                    re.findall(r"^<!-- .*", rest, re.MULTILINE)
                )
                known = {name.name, name.stem, *FOUND_BY_NAME.get(name.name, ())}
                assert any(word in shown for word in known), f"{path.name}: {block.title}"


FOUND_BY_NAME = {
    ".pyiceberg.yaml": ("iceberg://",),
    "spark-pipeline.yml": ("spark-pipelines run",),
    "test_search.py": ("$ pytest",),
    "test_contract.py": ("$ pytest",),
}
"""Files that a program finds by itself, and how that program is called."""
