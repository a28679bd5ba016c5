"""The port of a server: health, state as JSON, actions, tokens and their scopes, and streams."""

from __future__ import annotations

import hashlib
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import strandline as sl
from strandline.errors import Fenced, InvalidInput
from strandline.node.flight.security import ClientSecurity, Grant, Role, Scope, ServerSecurity, Tokens
from strandline.serve.api.permissions import Permissions, check_http
from strandline.serve.api.routes import ROUTES
from strandline.serve.config.values import Listen
from strandline.serve.http.access import Access, Denied
from strandline.serve.http.app import create_app
from strandline.serve.http.server import serving
from strandline.serve.http.tls import ServerTls
from tests.certificates import make_certificates, sign
from tests.cli.conftest import Run
from tests.serve.conftest import Serve, append
from tests.serve.test_parts import LOG, TABLE

TOKENS = {
    "admin": "admin", "reader": "read", "appender": "append", "app": "client",
    "scoped": "read:orders,append:orders", "prefixed": "append:ord*", "billing": "consume:orders/billing",
    "elsewhere": "client:payments",
}  # fmt: skip


def token(name: str) -> str:
    return f"token-of-{name}-and-more"


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """A token file, half of it hashed."""
    lines = [
        f"{name} {roles} {token(name) if number % 2 else 'sha256:' + hashlib.sha256(token(name).encode()).hexdigest()}"
        for number, (name, roles) in enumerate(TOKENS.items())
    ]
    (tmp_path / "tokens").write_text("\n".join(lines))
    return '[security]\ntokens = "tokens"\n'


# --- the state -------------------------------------------------------------------------------------------------


def test_the_state_of_logs_slots_tables_and_parts(serve: Serve, orders: Any) -> None:
    append(orders, b"1", b"2")
    orders.slots.create("idle", 0)
    running = serve(LOG + TABLE + 'slot = "billing"\n')
    running.until(lambda: running.state("tables", "orders").position == 2)
    running.until(lambda: running.lag("tables", "orders") == 0)
    status, found = running.ask("/v1/logs")
    assert (status, found) == (
        200, {"logs": [{"name": "orders", "address": "./orders", "status": "running", "error": None}]},
    )  # fmt: skip
    log = running.ask("/v1/logs/orders")[1]
    assert (log["first"], log["next"], log["floor"]) == (0, 2, 0)
    slots = {slot["slot"]: slot for slot in log["slots"]}
    assert (slots["idle"]["records_behind"], slots["idle"]["pins_floor"], slots["idle"]["bytes_behind"] > 0) == (
        2,
        True,
        True,
    )
    [table] = running.ask("/v1/tables")[1]["tables"]
    assert (table["name"], table["status"], table["position"], table["records_behind"]) == ("orders", "running", 2, 0)
    assert [part["section"] for part in running.ask("/v1/parts")[1]["parts"]] == ["logs", "tables"]
    assert running.ask("/v1/ingest") == (200, {"ingest": []})


def test_slots_are_created_moved_and_dropped_and_a_dry_run_changes_nothing(serve: Serve, orders: Any) -> None:
    append(orders, b"1", b"2")
    running = serve(LOG)
    running.until_ready()
    slots = "/v1/logs/orders/slots"

    def post(path: str, **body: Any) -> tuple[int, Any]:
        return running.ask(path, method="POST", body=body)

    for dry_run in (True, False):
        status, made = post(slots, name="s", at="beginning", dry_run=dry_run)
        assert (status, made["position"], made["dry_run"]) == (200, 0, dry_run)
        assert len(orders.slots.list()) == (not dry_run)
    assert post(slots, name="s")[0] == 409
    for dry_run in (True, False):
        status, moved = post(f"{slots}/s/reset", at=2, dry_run=dry_run)
        assert (status, moved["from"], moved["position"]) == (200, 0, 2)
        assert orders.slots.get("s").position == (0 if dry_run else 2)
    assert post(f"{slots}/s/reset", at=3)[0] == 400
    for dry_run in (True, False):
        assert post(f"{slots}/s/drop", dry_run=dry_run)[0] == 200
        assert len(orders.slots.list()) == dry_run
    assert post(f"{slots}/s/drop")[0] == 404


@pytest.mark.parametrize("at", [3, "3", -1, "9223372036854775807"])
def test_no_slot_is_put_behind_the_end_of_its_log(serve: Serve, orders: Any, at: str | int) -> None:
    append(orders, b"1", b"2")
    orders.slots.create("billing", 0)
    running = serve(LOG)
    running.until_ready()
    for path, more in (("", {"name": "new"}), ("/billing/reset", {})):
        for dry_run in (True, False):
            body = {"at": at, "dry_run": dry_run, **more}
            assert running.ask(f"/v1/logs/orders/slots{path}", method="POST", body=body)[0] == 400
    assert [(slot.name, slot.position) for slot in orders.slots.list()] == [("billing", 0)]


def test_a_log_is_trimmed_by_request(serve: Serve, orders: Any) -> None:
    append(orders, b"1")
    append(orders, b"2")
    orders.slots.create("s", 1)
    running = serve(LOG + 'retention = "consumed"\n')
    running.until_ready()
    would = running.ask("/v1/logs/orders/trim", method="POST", body={"dry_run": True})[1]
    assert (would["trimmed_records"], orders.bounds().first) == (1, 0)
    assert running.ask("/v1/logs/orders/trim", method="POST")[1]["trimmed_records"] == 1
    assert orders.bounds().first == 1


def test_a_part_is_paused_and_resumed(serve: Serve, orders: Any, tmp_path: Path) -> None:
    running = serve(LOG + TABLE)
    running.until_works("tables", "orders")
    path = "/v1/parts/tables/orders"
    assert running.ask(f"{path}/pause", method="POST", body={"dry_run": True})[1]["dry_run"]
    assert running.state("tables", "orders").status == "running"
    assert running.ask(f"{path}/pause", method="POST")[1]["status"] == "paused"
    append(orders, b"1")
    assert running.state("tables", "orders").position in (None, 0)
    assert running.ask(f"{path}/resume", method="POST")[0] == 200
    running.until(lambda: running.state("tables", "orders").position == 1)
    assert running.ask("/v1/parts/logs/orders/pause", method="POST")[0] == 400
    assert running.ask("/v1/parts/tables/nope/pause", method="POST")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/logs/nope", None, 404),
        ("GET", "/v1/logs/a%2fb", None, 400),
        ("GET", "/v1/logs/..", None, 404),
        ("PUT", "/v1/logs", b"", 405),
        ("POST", "/v1/logs/orders/slots", b"[", 400),
        ("POST", "/v1/logs/orders/slots", b"[" * 50_000, 400),
        ("POST", "/v1/logs/orders/slots", b'{"name": "s", "at": "now", "x": 1}', 400),
        ("POST", "/v1/logs/orders/slots", b'{"name": "../s"}', 400),
        ("POST", "/v1/logs/orders/slots", b'{"name": "s", "at": -1}', 400),
        ("POST", "/v1/logs/orders/trim", b" " * 70_000, 413),
    ],
)
def test_what_is_wrong_is_a_problem_document(
    serve: Serve, orders: Any, method: str, path: str, body: bytes | None, status: int
) -> None:
    running = serve(LOG)
    running.until_ready()
    found = running.ask(path, method=method, body=body)
    assert found[0] == status
    assert found[1]["status"] == status
    assert found[1]["detail"]
    assert orders.slots.list() == []


# --- who may what ----------------------------------------------------------------------------------------------

BYTES = "application/octet-stream"
READ, APPEND, CONSUME, ADMIN = Access.READ, Access.APPEND, Access.CONSUME, Access.ADMIN
MAY = {
    "admin": {READ, APPEND, CONSUME, ADMIN}, "reader": {READ}, "appender": {APPEND}, "app": {READ, APPEND, CONSUME},
    "scoped": {READ, APPEND}, "prefixed": {APPEND}, "billing": {READ, CONSUME}, "elsewhere": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", MAY)
def test_a_token_may_what_its_scopes_say_and_nothing_else(tokens: str, tmp_path: Path, name: str) -> None:
    permissions = Permissions(ServerSecurity.load(tokens=str(tmp_path / "tokens")))
    headers = {"authorization": f"Bearer {token(name)}"}
    may = {access for access in Access if permissions.denied(headers, access, log="orders", slot="billing") is None}
    assert may == MAY[name]
    if name == "billing":
        assert permissions.denied(headers, CONSUME, log="orders", slot="other") is not None
    if name in ("scoped", "billing"):
        assert permissions.denied(headers, READ, log="payments") is not None
        assert permissions.denied(headers, READ) is not None, "what is of no log takes a role on all"


def test_the_openapi_document_has_every_route(serve: Serve) -> None:
    found = serve("").ask("/v1/openapi.json")[1]
    assert {(path, method) for path, each in found["paths"].items() for method in each} == {
        (route.path, route.method.lower()) for route in ROUTES
    }
    for route in ROUTES:
        if route.body is not None:
            assert set(found["components"]["schemas"][route.body.__name__]["properties"]) == set(
                route.body.__struct_fields__
            )


def test_without_a_token_or_with_a_wrong_one_it_is_401_everywhere(serve: Serve, orders: Any, tokens: str) -> None:
    running = serve(LOG + tokens)
    running.until_ready()
    names = {"{log}": "orders", "{slot}": "s", "{table}": "t", "{section}": "tables", "{name}": "t", "{verb}": "pause"}
    for route in ROUTES:
        path = route.path
        for part, name in names.items():
            path = path.replace(part, name)
        for given in (None, "wrong", token("reader")[:-1]):
            body = {"name": "s", "at": 0} if route.path.endswith("slots") else {"at": 0} if "reset" in path else None
            assert running.ask(path, method=route.method, body=body, token=given)[0] == 401, route
    for path in ("/metrics", "/v1/stream/orders"):
        assert running.ask(path)[0] == 401
    assert running.ask("/healthz")[0] == running.ask("/readyz")[0] == 200


def test_why_it_is_not_ready_is_told_to_those_who_may_read(serve: Serve, tokens: str) -> None:
    running = serve(LOG.replace("./orders", "./missing") + tokens)
    running.until(lambda: running.state("logs", "orders").error)
    for caller in (None, "unknown", token("scoped")):
        assert running.ask("/readyz", token=caller) == (503, "it is not ready\n")
    assert "missing" in running.ask("/readyz", token=token("reader"))[1]


def test_an_error_of_no_known_kind_is_in_the_log_of_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = serve("")
    monkeypatch.setattr(running.server, "states", lambda: {}["no such thing"])
    assert running.ask("/v1/parts")[0] == 500
    assert [record.name for record in caplog.records if record.exc_info and record.name.startswith("strandline")]


def test_every_action_takes_its_scope(serve: Serve, orders: Any, tokens: str) -> None:
    append(orders, b"1")
    running = serve(LOG + tokens)
    running.until_ready()

    def status(path: str, name: str, method: str = "GET", body: Any = None) -> int:
        return running.ask(path, method=method, body=body, token=token(name))[0]

    assert [status("/v1/logs/orders", name) for name in ("reader", "scoped", "billing", "appender")] == [
        200,
        200,
        200,
        403,
    ]
    assert running.ask("/v1/logs", token=token("elsewhere"))[1] == {"logs": []}
    assert len(running.ask("/v1/logs", token=token("scoped"))[1]["logs"]) == 1
    assert [status("/v1/logs/orders/trim", name, "POST") for name in ("app", "admin")] == [403, 200]
    slots = "/v1/logs/orders/slots"
    assert [status(slots, "billing", "POST", {"name": name, "at": 0}) for name in ("other", "billing")] == [403, 200]
    assert status(f"{slots}/billing/drop", "reader", "POST") == 403
    assert [status("/v1/stream/orders?offset=-1", name) for name in ("reader", "appender")] == [200, 403]
    assert [status("/v1/stream/orders", name, "POST", b"x") for name in ("reader", "prefixed")] == [403, 204]
    assert [status("/metrics", name) for name in ("reader", "elsewhere")] == [200, 403]


def test_a_log_of_the_file_is_sealed_by_admins_only_and_a_stream_of_clients_by_who_appends(
    serve: Serve, orders: Any, tokens: str, tmp_path: Path
) -> None:
    running = serve(LOG + tokens + '[streams]\nroot = "./streams"\n')
    running.until_ready()

    def close(name: str, caller: str, body: bytes | None = None, **more: str) -> int:
        given = {"Authorization": f"Bearer {token(caller)}", "Stream_Closed": "true", "Content_Type": BYTES, **more}
        return sent(running, "POST", f"/v1/stream/{name}", body, **given)

    for caller in ("appender", "app", "scoped"):
        assert [close("orders", caller), close("orders", caller, b"x")] == [403, 403]
        assert close("orders", caller, b"x", Producer_Id="p", Producer_Epoch="0", Producer_Seq="0") == 403
    assert (orders.bounds().next, orders.bounds().sealed) == (0, False)
    refused = running.ask("/v1/stream/orders", method="DELETE", token=token("admin"))
    assert refused[0] == 403
    assert "strandline delete" in refused[1]["detail"]
    assert close("orders", "admin", b"x") == 204
    assert (orders.bounds().next, orders.bounds().sealed) == (1, True)
    assert running.ask("/v1/stream/made", method="PUT", body=b"1", token=token("admin"))[0] == 201
    assert close("made", "appender") == 204


def test_a_token_is_rotated_without_a_restart(tokens: str, tmp_path: Path) -> None:
    permissions = Permissions(ServerSecurity.load(tokens=str(tmp_path / "tokens")))
    headers = {"authorization": f"Bearer {token('reader')}"}
    (tmp_path / "tokens").write_text("reader nonsense x")
    permissions.reread()
    assert permissions.denied(headers, READ, log="orders") is None, "a file that is wrong changes nothing"
    (tmp_path / "tokens").write_text("reader read another-token-for-it")
    permissions.reread()
    assert isinstance(permissions.denied(headers, READ, log="orders"), Denied)
    assert permissions.denied({"authorization": "Bearer another-token-for-it"}, READ, log="orders") is None


def test_no_token_is_shown(tokens: str, tmp_path: Path) -> None:
    security = ServerSecurity.load(tokens=str(tmp_path / "tokens"))
    permissions = Permissions(security)
    denied = permissions.denied({"authorization": "Bearer hunter2-hunter2-hunter2"}, READ)
    forbidden = permissions.denied({"authorization": f"Bearer {token('reader')}"}, ADMIN)
    for shown in (repr(security), repr(permissions), repr(denied), repr(forbidden)):
        assert "hunter2" not in shown
        assert "token-of" not in shown


@pytest.mark.parametrize(
    "words", ["read:", "read:a/b", "replica:orders", "boss:orders", "read:..", "consume:a/b/c", "read:*a"]
)
def test_a_scope_that_means_nothing_is_refused(words: str) -> None:
    with pytest.raises(InvalidInput, match="Line 1 of tokens is no grant: the roles are") as refused:
        Tokens.parse(f"a {words} secret-secret-secret", "tokens")
    assert "secret-secret" not in str(refused.value)


def test_a_scope_of_one_log_is_none_on_another() -> None:
    grant = Grant("a", frozenset({Role.READ}), (Scope.parse("admin:orders"), Scope.parse("consume:pay*/b*")))
    assert grant.on("orders").may(Role.ADMIN)
    assert not grant.on("orders2").may(Role.ADMIN)
    assert grant.on("payments").may_consume("billing")
    assert not grant.on("payments").may_consume("other")
    assert not grant.may_consume("billing")


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:0"])
def test_other_machines_are_served_only_with_tls_and_tokens(listen: str) -> None:
    tokens = Tokens.parse("a read secret-secret-secret", "tokens")
    for security in (ServerSecurity(), ServerSecurity(tokens=tokens)):
        with pytest.raises(InvalidInput, match="can be reached by other machines"):
            check_http(Listen(listen), security)
    check_http(Listen("127.0.0.1:0"), ServerSecurity())
    check_http(Listen(listen), ServerSecurity(b"certificate", b"key", tokens=tokens))


def test_a_server_on_all_interfaces_without_tokens_does_not_start(run: Run, tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('[http]\nlisten = "0.0.0.0:0"\n')
    done = run("serve", tmp_path / "s.toml")
    assert done.exit_code == 1
    assert "A server on 0.0.0.0 can be reached by other machines" in done.stderr


def serial(port: int, context: ssl.SSLContext) -> Any:
    """The number of the certificate that a server presents; an error if it refuses the handshake."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as tls,
    ):
        return (tls.getpeercert() or {})["serialNumber"]


def test_https_with_a_certificate_that_is_renewed(serve: Serve, tokens: str, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    sign(tmp_path, "server", "IP:127.0.0.1")
    running = serve(tokens + 'cert = "server.pem"\nkey = "server.key"\n')
    assert running.url.startswith("https://127.0.0.1:")
    with urllib.request.urlopen(f"{running.url}/healthz", context=context, timeout=60) as answer:
        assert answer.read() == b"ok\n"
    port = int(running.url.rpartition(":")[2])
    first = serial(port, context)
    sign(tmp_path, "server", "IP:127.0.0.1")
    running.until(lambda: serial(port, context) != first)


def test_while_only_one_half_of_a_pair_is_renewed_the_former_pair_is_presented(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    certificate, key, roots = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    context.load_cert_chain(str(tmp_path / "replica-1.pem"), str(tmp_path / "replica-1.key"))
    tls = ServerTls(certificate, key, roots)
    sign(tmp_path, "renewed", "IP:127.0.0.1")
    with serving(create_app({}), "127.0.0.1", 0, tls=tls) as port:
        first = serial(port, context)
        for half in ("pem", "key"):
            tls.renew()
            assert serial(port, context) == first
            (tmp_path / f"renewed.{half}").rename(tmp_path / f"node.{half}")
        tls.renew()
        assert serial(port, context) != first
        (tmp_path / "node.pem").write_bytes(b"")
        tls.renew()
        assert serial(port, context) != first


def test_callers_with_a_certificate_of_the_authority_are_clients(serve: Serve, orders: Any, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    running = serve(LOG + '[security]\ncert = "node.pem"\nkey = "node.key"\nclient_ca = "ca.pem"\n')
    running.until_ready()
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))

    def status(path: str, method: str = "GET") -> int:
        request = urllib.request.Request(running.url + path, method=method)
        try:
            with urllib.request.urlopen(request, context=context, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with pytest.raises(OSError, match=r"certificate required|reset|EOF|handshake|closed connection"):
        status("/healthz")
    context.load_cert_chain(str(tmp_path / "replica-1.pem"), str(tmp_path / "replica-1.key"))
    assert [status("/v1/logs/orders"), status("/v1/logs/orders/trim", "POST")] == [200, 403]


# --- the same tokens over Flight -------------------------------------------------------------------------------


def test_the_same_tokens_with_their_scopes_serve_flight(serve: Serve, tokens: str, tmp_path: Path) -> None:
    (tmp_path / "own-token").write_text(token("admin"))
    running = serve(
        '[flight]\nlisten = "127.0.0.1:0"\n' + tokens + 'token = "own-token"\n'
        '[logs.orders]\naddress = "./node"\ncreate = true\nnode = { name = "a", lead = true }\n'
    )
    running.until_ready()
    node = running.server.served("orders").node
    assert node is not None

    def opened(name: str) -> Any:
        return sl.open(node.url, security=ClientSecurity(token=token(name)))

    append(opened("scoped"), b"1")
    append(opened("prefixed"), b"2")
    append(opened("app"), b"3")
    assert sum(batch.num_rows for batch in opened("reader").read(0)) == 3
    opened("billing").slots.create("billing", 0)
    with pytest.raises(Fenced, match="takes the role"):
        opened("billing").slots.create("other", 0)
    with pytest.raises(Fenced, match="takes the role"):
        list(opened("appender").read(0))
    for name in ("reader", "elsewhere", "billing"):
        with pytest.raises(Exception, match=r"takes the role|held back|may not"):
            append(opened(name), b"x")
    assert node.bounds().next == 3


# --- pages in browsers -----------------------------------------------------------------------------------------


def asked(
    running: Any, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage]:
    """Status and headers of the answer to a request with these headers, as a browser sends them."""
    port = int(running.url.rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        given = {"Content-Type": "text/plain", **{key.replace("_", "-"): value for key, value in headers.items()}}
        connection.request(method, path, body, given)
        answer = connection.getresponse()
        return answer.status, answer.headers
    finally:
        connection.close()


def sent(running: Any, method: str, path: str, body: bytes | None = None, **headers: str) -> int:
    """The status of such a request."""
    return asked(running, method, path, body, **headers)[0]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/logs/orders/trim"),
        ("POST", "/v1/logs/orders/slots/billing/drop"),
        ("POST", "/v1/stream/orders"),
        ("GET", "/v1/stream/orders"),
        ("GET", "/v1/logs"),
        ("GET", "/metrics"),
    ],
)
def test_without_tokens_no_page_of_another_origin_is_answered(
    serve: Serve, orders: Any, method: str, path: str
) -> None:
    orders.slots.create("billing", 0)
    running = serve(LOG)
    running.until_ready()
    port = running.url.rpartition(":")[2]
    assert sent(running, method, path, Origin="https://evil.example") == 403
    assert sent(running, method, path, Origin="null") == 403
    assert sent(running, method, path, Origin=f"http://127.0.0.1:{int(port) + 1}") == 403
    assert sent(running, method, path, Host=f"evil.example:{port}") == 403, "a name that leads to this machine"
    assert sent(running, method, path, Host=f"evil.example:{port}", Origin=f"http://evil.example:{port}") == 403
    assert orders.bounds().next == 0
    assert [slot.name for slot in orders.slots.list()] == ["billing"]
    assert sent(running, method, path, Host=f"LOCALHOST:{port}", Origin=f"http://localhost:{port}") < 500
    assert sent(running, method, path, Host="[::1]") != 403


def test_with_tokens_the_origin_and_the_host_decide_nothing(serve: Serve, orders: Any, tokens: str) -> None:
    running = serve(LOG + tokens)
    running.until_ready()
    given = {"Authorization": f"Bearer {token('admin')}", "Host": "logs.example", "Origin": "https://app.example"}
    assert sent(running, "POST", "/v1/logs/orders/trim", **given) == 200


APP = "https://app.example"


def test_pages_of_listed_origins_read_all_answers_and_those_of_others_none(serve: Serve, orders: Any) -> None:
    running = serve(f'[http]\nlisten = "127.0.0.1:0"\norigins = ["{APP}"]\n{LOG}')
    running.until_ready()
    given = {"Origin": APP, "Content_Type": BYTES}
    for method, path, status in (
        ("POST", "/v1/stream/orders", 204), ("GET", "/v1/stream/orders?offset=-1", 200), ("GET", "/v1/logs", 200),
        ("GET", "/v1/stream/none", 404), ("GET", "/v1/logs/none", 404), ("GET", "/v1/logs/a%2fb", 400),
    ):  # fmt: skip
        found = asked(running, method, path, b"x" if method == "POST" else None, **given)
        assert (found[0], found[1]["Access-Control-Allow-Origin"], "Origin" in (found[1].get_all("Vary") or ())) == (
            status,
            APP,
            True,
        ), path
        assert "Stream-Next-Offset" in found[1]["Access-Control-Expose-Headers"]
        assert found[1]["Access-Control-Allow-Credentials"] is None
        assert sent(running, method, path, b"x" if method == "POST" else None, Origin="https://evil.example") == 403
        host = {"Host": "evil.example", **given}
        assert sent(running, method, path, b"x" if method == "POST" else None, **host) == 403, "a name that leads here"
    assert orders.bounds().next == 1


@pytest.mark.parametrize("path", ["/v1/stream/orders", "/v1/logs/orders/slots", "/metrics"])
def test_a_browser_is_told_what_pages_of_a_listed_origin_may_send(
    serve: Serve, orders: Any, tokens: str, path: str
) -> None:
    del orders
    running = serve(f'[http]\nlisten = "127.0.0.1:0"\norigins = ["{APP}"]\n{LOG}{tokens}')
    running.until_ready()
    wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}
    status, headers = asked(running, "OPTIONS", path, Origin=APP, **wanted)
    assert (status, headers["Access-Control-Allow-Origin"]) == (204, APP)
    assert ("POST" in headers["Access-Control-Allow-Methods"]) == (path != "/metrics")
    assert {"Authorization", "Producer-Id"} <= set(headers["Access-Control-Allow-Headers"].split(", "))
    assert (
        asked(running, "OPTIONS", path, Origin="https://evil.example", **wanted)[1]["Access-Control-Allow-Origin"]
        is None
    )
    status, headers = asked(running, "GET", path, Origin=APP)
    assert (status, headers["Access-Control-Allow-Origin"]) == (401 if "slots" not in path else 405, APP)


def test_with_tokens_pages_of_any_origin_may_be_let_in(serve: Serve, orders: Any, tokens: str) -> None:
    append(orders, b"1")
    running = serve(f'[http]\nlisten = "127.0.0.1:0"\norigins = ["*"]\n{LOG}{tokens}')
    running.until_ready()
    for caller, expected in ((token("reader"), 200), ("unknown", 401)):
        given = {"Authorization": f"Bearer {caller}", "Origin": APP}
        status, headers = asked(running, "GET", "/v1/stream/orders?offset=-1", **given)
        assert (status, headers["Access-Control-Allow-Origin"]) == (expected, "*")
        assert headers["Access-Control-Allow-Credentials"] is None
