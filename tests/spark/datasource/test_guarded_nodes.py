"""Spark reads nodes that ask for a token, or speak TLS: the driver plans, executors read by tickets."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import strandline as sl
from strandline.node.flight.security import ClientSecurity, ServerSecurity, Tokens
from strandline.spark.datasource.source import StrandlineDataSource

BATCHES, ROWS = 40, 25


def fill(primary: sl.node.Primary) -> None:
    for number in range(BATCHES):
        primary.append(pa.table({"value": [b"%d" % (number * ROWS + row) for row in range(ROWS)]})).ensure()


TOKEN = "token-of-the-spark-driver"
SERVER = ServerSecurity(tokens=Tokens.parse(f"spark client {TOKEN}\n", "tokens"))


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[sl.node.Primary]:
    with sl.node.Primary.open(tmp_path / "a", name="a", policy="local", server=SERVER) as primary:
        yield primary


@pytest.mark.parametrize("how", ["tokenFile", pytest.param("token", marks=pytest.mark.matrix)])
def test_executors_read_a_node_by_tickets_and_only_the_driver_has_the_token(spark, guarded, tmp_path, how):
    fill(guarded)
    (tmp_path / "token").write_text(TOKEN + "\n")
    given = {"tokenFile": str(tmp_path / "token"), "token": TOKEN}[how]
    frame = spark.read.format("strandline").option(how, given).option("partitions", 2).load(guarded.url)
    assert sorted(row.offset for row in frame.select("offset").collect()) == list(range(BATCHES * ROWS))
    assert TOKEN not in frame._jdf.queryExecution().toString()
    source = StrandlineDataSource({"path": guarded.url, how: given, "partitions": "2"})
    reader = source.reader(source.schema())
    sent = cloudpickle.dumps((reader.read, reader.partitions()))
    assert TOKEN.encode() not in sent
    assert str(tmp_path / "token").encode() not in sent
    read, partitions = pickle.loads(sent)
    assert sum(batch.num_rows for each in partitions for batch in read(each)) == BATCHES * ROWS


def test_a_query_without_the_token_says_so(spark, guarded):
    with pytest.raises(Exception, match="no token that this node knows"):
        spark.read.format("strandline").load(guarded.url).count()
    with pytest.raises(Exception, match=r"tokenFile is for nodes \(grpc://\)"):
        spark.read.format("strandline").option("tokenFile", "x").load("file:///tmp/log").count()


@pytest.mark.matrix
def test_a_table_follows_a_node_that_asks_for_a_token(spark, guarded, tmp_path):
    fill(guarded)
    sink = sl.DeltaSink(tmp_path / "table", mode="append")
    with sl.open(guarded.url, security=ClientSecurity(token=TOKEN)) as log:
        following = sl.spark.follow(spark, log, sink, slot="billing", trigger={"availableNow": True})
        assert following.await_termination(120)
        assert TOKEN not in str(following.progress())
        assert log.slots.get("billing").position == BATCHES * ROWS


@pytest.mark.matrix
def test_a_query_reads_nodes_over_tls_from_replicas(spark, tmp_path, certificate_folder):
    tls = ServerSecurity.load(certificate=f"{certificate_folder}/node.pem", key=f"{certificate_folder}/node.key")
    server = replace(tls, tokens=SERVER.tokens)
    with sl.node.Primary.open(tmp_path / "a", name="a", policy="local", server=server) as primary:
        fill(primary)
        options = {"token": TOKEN, "caFile": f"{certificate_folder}/ca.pem", "readFrom": "replicas"}
        url = f"{primary.url},127.0.0.1:1"
        assert spark.read.format("strandline").options(**options).load(url).count() == BATCHES * ROWS
        security = ClientSecurity.load(roots=f"{certificate_folder}/ca.pem")
        with sl.open(url, security=replace(security, token=TOKEN)) as log:
            sink = sl.DeltaSink(tmp_path / "table", mode="append")
            following = sl.spark.follow(spark, log, sink, slot="billing", trigger={"availableNow": True})
            assert following.await_termination(120)
            assert log.slots.get("billing").position == BATCHES * ROWS
