"""Who may do what over the wire, and how much at a time."""

import hashlib
import logging
import pickle
import shutil
import threading

import pyarrow.flight as fl
import pytest

from strandline.errors import (
    Fenced,
    InvalidInput,
    Overloaded,
    StorageError,
    StrandlineError,
    TransientStorageError,
)
from strandline.model.cursor import Cursor
from strandline.node.flight.client.primary_client import FlightUpstream
from strandline.node.flight.client.remote_log import RemoteLog
from strandline.node.flight.security import ClientSecurity, Role, ServerSecurity, Tokens
from strandline.node.flight.server.limits import ServerLimits
from strandline.node.flight.server.server import FlightNode
from strandline.node.messages import Caller, ReplicaProgress
from tests.certificates import sign
from tests.node.flight.flight_double import TABLE, Node, records

TOKENS = """
# name roles token
replica-1 replica token-of-replica-1
replica-2 replica token-of-replica-2
app client token-of-the-app-1
ops client,admin token-of-the-admin
"""


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path / "log")
    yield node
    node.close()


@pytest.fixture
def guarded(node):
    with FlightNode(node, security=ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens"))) as server:
        yield server


def token(word):
    return ClientSecurity(token=word)


def every_call(upstream, caller, log_id):
    """All that a replica asks for."""
    return {
        "register": lambda: upstream.register(caller, region=None),
        "unregister": lambda: upstream._channel.call("unregister", **caller._asdict()),
        "resume": lambda: upstream.resume(caller, None),
        "feed": lambda: first_of(upstream, caller, log_id),
        "acknowledge": lambda: upstream.acknowledge(caller, ReplicaProgress(0, 0)),
        "begin_snapshot": lambda: upstream.begin_snapshot(caller, "wal"),
        "chunks": lambda: list(upstream.chunks(caller, "s", "a", 0)),
        "end_snapshot": lambda: upstream.end_snapshot(caller, Cursor(log_id, 0)),
        "report": lambda: upstream.report(caller),
    }


def first_of(upstream, caller, log_id):
    feed = upstream.feed(caller, Cursor(log_id, 0))
    try:
        return feed.take(5)
    finally:
        feed.close()


def test_a_replica_speaks_for_itself_alone(node, guarded):
    node.files["a"] = b"bytes"
    node.log.append_batch(records(b"a")).result(120)
    with FlightUpstream(guarded.url, security=token("token-of-replica-1")) as upstream:
        for name, call in every_call(upstream, Caller("replica-2"), node.log.log_id).items():
            with pytest.raises(Fenced, match="calls under its own name"):
                call()
            assert not any(asked[0] == name for asked in node.asked), name
        for name, call in every_call(upstream, Caller("replica-1"), node.log.log_id).items():
            call()
            assert any(asked[0] == name for asked in node.asked), name


def test_a_client_is_no_replica_and_a_replica_no_client(node, guarded):
    with FlightUpstream(guarded.url, security=token("token-of-the-app-1")) as upstream:
        for call in every_call(upstream, Caller("app", 1), node.log.log_id).values():
            with pytest.raises(Fenced, match="role replica"):
                call()
        upstream.topology(Caller("app", 99))
        assert node.asked[-1] == ("topology", Caller("app", 0))  # no client makes a primary believe in a higher term
    with RemoteLog(guarded.url, security=token("token-of-replica-1")) as remote:
        list(remote.read())
        for call in (lambda: remote.append(TABLE), remote.promote):
            with pytest.raises(Fenced, match="role"):
                call()
    assert node.log.bounds().next == 0


def test_only_an_administrator_promotes_or_unregisters_another(node, guarded):
    with RemoteLog(guarded.url, security=token("token-of-the-app-1")) as remote:
        assert remote.append(TABLE).receipt.count == 2
        with pytest.raises(Fenced, match="admin"):
            remote.promote()
    with RemoteLog(guarded.url, security=token("token-of-the-admin")) as remote:
        remote.promote()
        with FlightUpstream(guarded.url, security=token("token-of-the-admin")) as upstream:
            upstream._channel.call("unregister", name="replica-1", term=0)


@pytest.mark.parametrize("word", [None, "token-of-replica-3", "token-of-replica-", "token-of-replica-1x", "short-7"])
def test_a_caller_without_a_token_is_refused_everywhere(node, guarded, word, caplog):
    caplog.set_level(logging.DEBUG)
    with FlightUpstream(guarded.url, security=word and token(word)) as upstream:
        for call in every_call(upstream, Caller("replica-1"), node.log.log_id).values():
            with pytest.raises(Fenced, match="no token that this node knows"):
                call()
    with RemoteLog(guarded.url, security=word and token(word)) as remote:
        for call in (remote.bounds, lambda: list(remote.read()), lambda: remote.append(TABLE)):
            with pytest.raises(Fenced, match="no token"):
                call()
    with fl.connect(guarded.url) as bare, pytest.raises(fl.FlightUnauthenticatedError):
        list(bare.list_flights())
    assert node.asked == []
    assert word is None or word not in caplog.text


@pytest.mark.parametrize(
    "header", ["token-of-replica-1", "Basic token-of-replica-1", "Bearer", "Bearer ", "Bearer a b", ""]
)
def test_only_a_bearer_of_the_token_counts(guarded, header):
    options = fl.FlightCallOptions(headers=[(b"authorization", header.encode())])
    with fl.connect(guarded.url) as bare, pytest.raises(fl.FlightUnauthenticatedError):
        list(bare.do_action("bounds", options))


def test_a_bare_client_reads_with_a_token(node, guarded):
    node.log.append_batch(records(b"a")).result(120)
    options = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer token-of-the-app-1")])
    with fl.connect(guarded.url) as bare:
        assert bare.do_get(fl.Ticket(b""), options).read_all().num_rows == 1


def test_tokens_show_nowhere(tmp_path):
    tokens = Tokens.parse(TOKENS, "tokens")
    server, client = ServerSecurity(b"cert", b"the key", None, tokens), ClientSecurity(token="token-of-the-app-1")
    for thing in (tokens, server, client, FlightUpstream("grpc://127.0.0.1:1", security=client)):
        assert "token-of" not in repr(thing)
        assert "the key" not in repr(thing)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("replica-1 replica", "2 words"),
        ("replica-1 boss token-of-the-boss", "roles are replica, client, admin, read, append, consume"),
        ("replica-1 replica short-token", "at least 16"),
        ("replica-1 replica sha256:abcd", "64 digits"),
        ("replica-1 replica sha256:nonsense-of-a-hash", "Line 2"),
        ("replica-1 replica töken-öf-the-böss", "plain letters"),
        ("other client token-of-somebody\nreplica-1 replica token-of-somebody", "twice"),
    ],
)
def test_a_token_file_with_a_mistake_says_where_and_shows_no_token(line, why):
    with pytest.raises(InvalidInput, match=why) as found:
        Tokens.parse("# tokens\n" + line, "the file")
    assert line.split()[-1] not in str(found.value)
    assert found.value.__cause__ is None


def test_tokens_are_loaded_from_a_file_by_themselves_or_by_their_hash(tmp_path, node):
    hashed = hashlib.sha256(b"token-of-replica-1").hexdigest()
    (tmp_path / "tokens").write_text(f"replica-1 replica sha256:{hashed}\napp client token-of-the-app-1\n")
    security = ServerSecurity.load(tokens=str(tmp_path / "tokens"))
    (tmp_path / "token").write_text("token-of-the-app-1\n")
    with FlightNode(node, security=security) as server:
        with RemoteLog(server.url, security=ClientSecurity.load(token=str(tmp_path / "token"))) as remote:
            assert remote.bounds().next == 0
        with FlightUpstream(server.url, security=token("token-of-replica-1")) as upstream:
            upstream.acknowledge(Caller("replica-1"), ReplicaProgress(0, 0))
        with FlightUpstream(server.url, security=token(hashed)) as upstream, pytest.raises(Fenced):
            upstream.acknowledge(Caller("replica-1"), ReplicaProgress(0, 0))


def test_without_security_only_this_machine_is_let_in(node):
    tokens = ServerSecurity(tokens=Tokens.parse(TOKENS, "tokens"))
    for host in ("0.0.0.0", "::", "192.0.2.1", "somewhere.example"):
        with pytest.raises(InvalidInput, match="allow it"):
            FlightNode(node, host=host)
        with pytest.raises(InvalidInput, match="certificate"):
            FlightNode(node, host=host, security=tokens)
    open_to_all = FlightNode(node, host="0.0.0.0", insecure=True)
    with open_to_all, RemoteLog(f"grpc://127.0.0.1:{open_to_all.port}") as remote:
        remote.bounds()
    for host in ("localhost", "127.0.0.1"):
        with FlightNode(node, host=host) as server, RemoteLog(server.url) as remote:
            remote.bounds()


@pytest.mark.parametrize(("first", "second"), [("127.0.0.1", "localhost"), ("localhost", "127.0.0.1")])
def test_a_port_of_which_another_node_has_one_address_is_taken(node, first, second):
    with FlightNode(node, host=first) as server:
        with pytest.raises(StorageError, match="another program has that port"):
            FlightNode(node, host=second, port=server.port)
        with RemoteLog(server.url) as remote:
            remote.bounds()


def test_a_token_does_not_leave_this_machine_in_plain_text():
    with pytest.raises(InvalidInput, match="in plain text") as found:
        RemoteLog("grpc://192.0.2.1:7", security=token("token-of-the-app-1"))
    assert "token-of" not in str(found.value)
    RemoteLog("grpc+tls://192.0.2.1:7", security=token("token-of-the-app-1")).close()
    with pytest.raises(InvalidInput, match=r"grpc\+tls"):
        RemoteLog("grpc://127.0.0.1:7", security=ClientSecurity(roots=b"pem"))


# --- certificates ----------------------------------------------------------------------------------------------


@pytest.fixture
def certificates(certificate_folder):
    return lambda name: (certificate_folder / name).read_bytes()


def client_of(certificates, name=None, **options):
    pair = {} if name is None else {"certificate": certificates(f"{name}.pem"), "key": certificates(f"{name}.key")}
    return ClientSecurity(roots=certificates("ca.pem"), **pair, **options)


def test_a_client_that_trusts_its_certificate_reaches_a_node_over_tls(node, certificates):
    security = ServerSecurity(certificates("node.pem"), certificates("node.key"))
    with FlightNode(node, security=security) as server:
        assert server.url.startswith("grpc+tls://")
        with RemoteLog(server.url, security=client_of(certificates)) as remote:
            assert remote.append(TABLE).receipt.count == 2
        for url, trusting in (
            (server.url, ClientSecurity(roots=certificates("other-ca.pem"))),
            (server.url.replace("grpc+tls", "grpc"), None),
        ):
            with RemoteLog(url, security=trusting, timeout=3) as remote, pytest.raises(TransientStorageError):
                remote.bounds()


def test_a_certificate_names_a_replica(node, certificates):
    security = ServerSecurity(
        certificates("node.pem"),
        certificates("node.key"),
        certificates("ca.pem"),
        identities={"replica-1": frozenset({Role.REPLICA}), "replica-2": frozenset({Role.ADMIN})},
    )
    with FlightNode(node, security=security) as server:
        with FlightUpstream(server.url, security=client_of(certificates, "replica-1")) as upstream:
            upstream.acknowledge(Caller("replica-1"), ReplicaProgress(0, 0))
            with pytest.raises(Fenced, match="may not call as replica"):
                upstream.acknowledge(Caller("replica-2"), ReplicaProgress(0, 0))
        # The first alternative name counts, if a certificate has any.
        upstream = FlightUpstream(server.url, security=client_of(certificates, "by-other-name"))
        with upstream, pytest.raises(Fenced, match="'replica-2' may not do this"):
            upstream.register(Caller("replica-2"), region=None)
        with RemoteLog(server.url, security=client_of(certificates, "by-other-name")) as remote:
            remote.promote()
        for name in (None, "stranger"):
            nobody = FlightUpstream(server.url, security=client_of(certificates, name), timeout=3)
            with nobody, pytest.raises(TransientStorageError):
                nobody.acknowledge(Caller("replica-1"), ReplicaProgress(0, 0))


def test_with_tokens_and_certificates_both_are_needed_and_the_token_names(node, certificates):
    tokens = Tokens.parse(TOKENS, "tokens")
    security = ServerSecurity(certificates("node.pem"), certificates("node.key"), certificates("ca.pem"), tokens)
    with FlightNode(node, host="0.0.0.0", security=security) as server:
        url = f"grpc+tls://127.0.0.1:{server.port}"
        both = client_of(certificates, "replica-1", token="token-of-replica-2")
        with FlightUpstream(url, security=both) as upstream:
            upstream.acknowledge(Caller("replica-2"), ReplicaProgress(0, 0))
        with FlightUpstream(url, security=client_of(certificates, "replica-1")) as upstream, pytest.raises(Fenced):
            upstream.acknowledge(Caller("replica-1"), ReplicaProgress(0, 0))
        alone = client_of(certificates, token="token-of-replica-2")
        with FlightUpstream(url, security=alone, timeout=3) as upstream, pytest.raises(TransientStorageError):
            upstream.acknowledge(Caller("replica-2"), ReplicaProgress(0, 0))


def test_certificates_and_tokens_are_read_again_without_a_restart(node, certificate_folder, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sign(certificate_folder, "renewed", "DNS:localhost,IP:127.0.0.1", "other-ca")
    paths = {"certificate": f"{tmp_path}/pem", "key": f"{tmp_path}/key", "tokens": f"{tmp_path}/tokens"}

    def write(pem=None, key=None, tokens=None):
        for name, found in (("pem", pem), ("key", key)):
            if found is not None:
                shutil.copy(certificate_folder / found, tmp_path / name)
        if tokens is not None:
            (tmp_path / "tokens").write_text(tokens)

    def call(authority, word):
        security = ClientSecurity(roots=(certificate_folder / authority).read_bytes(), token=word)
        with RemoteLog(server.url, security=security, timeout=20) as remote:
            return remote.bounds().next

    write("node.pem", "node.key", TOKENS)
    with FlightNode(node, security=ServerSecurity.load(**paths)) as server:
        server.reread_security()
        assert not caplog.messages  # nothing has changed
        assert call("ca.pem", "token-of-the-app-1") == 0
        write("renewed.pem", None, "late client token-of-a-late-one\n")
        server.reread_security()
        server.reread_security()
        assert len(caplog.messages) == 1  # half of it is written
        assert "goes on with its former certificates and tokens" in caplog.messages[0]
        assert call("ca.pem", "token-of-the-app-1") == 0
        write(None, "renewed.key")
        server.reread_security()
        assert call("other-ca.pem", "token-of-a-late-one") == 0
        with pytest.raises(Fenced, match="no token that this node knows"):
            call("other-ca.pem", "token-of-the-app-1")


def test_what_was_loaded_from_files_can_be_sent_to_an_executor(certificate_folder):
    pair = {"certificate": f"{certificate_folder}/replica-1.pem", "key": f"{certificate_folder}/replica-1.key"}
    loaded = ClientSecurity.load(**pair)
    assert pickle.loads(pickle.dumps(loaded)) == loaded == loaded.reread()
    with pytest.raises(InvalidInput, match="no certificate and its key"):
        ClientSecurity.load(**{**pair, "key": f"{certificate_folder}/node.key"})


def test_half_a_certificate_is_a_mistake():
    for wrong in (
        lambda: ServerSecurity(certificate=b"pem"),
        lambda: ServerSecurity(client_roots=b"pem"),
        lambda: ClientSecurity(key=b"pem"),
        lambda: ClientSecurity(token="with\nnewline"),
    ):
        with pytest.raises(InvalidInput):
            wrong()


# --- limits ----------------------------------------------------------------------------------------------------


def open_feed(upstream, name, log_id):
    feed = upstream.feed(Caller(name), Cursor(log_id, 0))
    while feed.heartbeat is None:
        feed.take(5)
    return feed


def test_too_many_streams_are_overloaded_until_one_ends(node):
    limits = ServerLimits(calls=3, calls_each=2)
    with FlightNode(node, limits=limits, heartbeat_seconds=0.05) as server, FlightUpstream(server.url) as upstream:
        feeds = [open_feed(upstream, "one", node.log.log_id) for _ in range(2)]
        with pytest.raises(Overloaded, match="one has 2 calls"):
            open_feed(upstream, "one", node.log.log_id)
        feeds.append(open_feed(upstream, "two", node.log.log_id))
        with pytest.raises(Overloaded, match="busy with 3"):
            upstream.topology(Caller("two"))
        feeds.pop(0).close()
        assert node.closed_feeds.acquire(timeout=120)
        for _ in range(1000):
            try:
                upstream.topology(Caller("two"))
                break
            except Overloaded:
                threading.Event().wait(0.01)
        assert Overloaded.retryable
        for feed in feeds:
            feed.close()


def test_every_call_gives_its_place_back_however_it_ends(node, guarded):
    node.error = StrandlineError("no")
    with FlightUpstream(guarded.url, security=token("token-of-replica-1")) as upstream:
        for caller in (Caller("replica-1"), Caller("replica-2")):
            for call in every_call(upstream, caller, node.log.log_id).values():
                with pytest.raises(StrandlineError):
                    call()
    with fl.connect(guarded.url) as bare:
        options = fl.FlightCallOptions(headers=[(b"authorization", b"Bearer token-of-the-app-1")])
        for _ in range(5):
            reader = bare.do_get(fl.Ticket(b'{"follow": true}'), options)
            reader.cancel()
        writer, _ = bare.do_put(fl.FlightDescriptor.for_path("log"), TABLE.schema, options)
        writer.write_table(TABLE)
        del writer, reader
    for _ in range(1000):
        if not guarded.calls:
            break
        threading.Event().wait(0.01)
    assert guarded.calls == 0


def test_limits_that_refuse_everything_are_a_mistake():
    with pytest.raises(InvalidInput):
        ServerLimits(calls=0)
