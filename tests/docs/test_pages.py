"""The commands and programs of the pages, run as they stand."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from uuid import uuid4

import pytest

from tests.docs.pages import HOME, Page, PageFailed, agrees, blocks
from tests.servers import BUCKET, AzureServer, KafkaServer, S3Server, fresh_prefix

DOCS = HOME / "docs"
SHELL = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "```console" in path.read_text()}
IN_THE_CLOUD = {f"howto/{name}.md" for name in ("s3", "gcs", "azure", "kafka", "nats")}
WITH_SPARK = {"tutorial/spark.md"}
FIRST = {"index.md", "tutorial/table.md", "tutorial/service.md"}
"""Pages that `make test` runs; `make test-matrix` runs the others."""


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def run(name: str, folder: Path, **options: object) -> None:
    page = Page(DOCS / name, folder, **options)
    page.instead |= {port: free_port() for port in ("7451", "7452", "7453") if port in page.text}
    page.run()


def cases(names: set[str]) -> list[object]:
    return [pytest.param(name, marks=() if name in FIRST else pytest.mark.matrix) for name in sorted(names)]


@pytest.mark.parametrize("name", cases(SHELL - IN_THE_CLOUD - WITH_SPARK))
def test_a_page_does_what_it_shows(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


@pytest.mark.spark
@pytest.mark.parametrize("name", cases(WITH_SPARK))
def test_a_page_with_spark_does_what_it_shows(name: str, tmp_path: Path) -> None:
    run(name, tmp_path)


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


@pytest.mark.matrix
def test_the_page_on_kafka_works_on_a_broker(kafka_server: KafkaServer, tmp_path: Path) -> None:
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    topic = f"orders-{uuid4().hex}"
    client = {"bootstrap.servers": kafka_server.bootstrap}
    admin = AdminClient(client)  # its answers end with it
    admin.create_topics([NewTopic(topic, 1)])[topic].result(60)
    producer = Producer(client)
    for key in ("o-1", "o-2"):
        producer.produce(topic, key=key, value="new", partition=0)
    assert producer.flush(60) == 0
    run("howto/kafka.md", tmp_path, instead={"broker:9092/orders": f"{kafka_server.bootstrap}/{topic}"})


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


def test_every_example_is_run_by_some_test() -> None:
    """A block is a doctest, a file, a terminal, or something that nobody runs: output, a layout, a fragment."""
    for path in DOCS.rglob("*.md"):
        for block in blocks(path.read_text()):
            is_run = block.is_file or block.language == "console" or ">>>" in block.body
            if path.parent.name in {"tutorial", "howto"} or path.stem in {"index", "concepts", "comparison"}:
                assert is_run, f"{path.name}: {block.body.splitlines()[0]}"
