"""Endpoints, credentials, TLS and proxies, as the documentation states them, against real servers."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strandline.errors import NotFound, StorageError, TransientStorageError
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ABSENT, Match
from strandline.storage.objects.urls import open_store
from strandline.testing.stores import content, paths
from tests.proxy import FaultyProxy, answer, latency_proxy
from tests.servers import BUCKET, AzureServer, NoServer, S3Server, Server, free_port, fresh_prefix, started
from tests.storage.child_programs import PATIENCE, run_python

OPEN = """
import json, sys
from strandline.storage.objects.urls import open_store
options = json.loads(sys.argv[2])
store = open_store(sys.argv[1], options or None)
print(bytes(store.get("greeting").data).decode())
"""


@pytest.fixture(params=["s3", pytest.param("azure", marks=pytest.mark.matrix)])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def url(server: Server) -> str:
    """A place with one object in it."""
    url = server.url(BUCKET, fresh_prefix())
    ObstoreStore(url, server.options).put("greeting", b"hello")
    return url


def assert_refused(url: str, options: dict[str, str], *words: str) -> None:
    """Every call of such a store raises an error with these words, and not a transient one."""
    store = open_store(url, options)
    for call in (
        lambda: store.get("greeting"),
        lambda: store.get_range("greeting", 0, 1),
        lambda: store.put("new", b""),
        lambda: store.put_if("new", b"", ABSENT),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert type(caught.value) is StorageError, caught.value
        assert not caught.value.retryable
        for word in words:
            assert word in str(caught.value)
        for name, value in options.items():
            assert "key" not in name or name == "access_key_id" or value not in str(caught.value)


class TestOptions:
    def test_options_open_a_store(self, server: Server, url: str) -> None:
        assert content(open_store(url, server.options), "greeting") == b"hello"

    def test_options_reach_another_process_as_an_argument_and_in_a_pickle(self, server: Server, url: str) -> None:
        assert run_python(OPEN, url, json.dumps(server.options)) == "hello\n"
        copy = pickle.loads(pickle.dumps(open_store(url, server.options)))
        assert content(copy, "greeting") == b"hello"

    def test_the_environment_does_as_well(self, server: Server, url: str) -> None:
        program = [sys.executable, "-c", OPEN, url, "null"]
        environment = {**os.environ, **server.environment}
        found = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert (found.stdout, found.returncode) == ("hello\n", 0), found.stderr

    def test_options_may_carry_the_name_of_their_cloud_and_capitals(
        self, s3_server: S3Server, azure_server: AzureServer
    ) -> None:
        amazon = {f"AWS_{name}".upper(): value for name, value in s3_server.options.items()}
        azure = {
            "azure_endpoint": azure_server.options["endpoint"],
            "azure_storage_account_name": azure_server.account,
            "azure_storage_account_key": azure_server.key,
            "azure_allow_http": "true",
        }
        for server, options in ((s3_server, amazon), (azure_server, azure)):
            store = open_store(server.url(BUCKET, fresh_prefix()), options)
            store.put("a", b"1")
            assert paths(store) == ["a"]

    def test_options_win_over_the_environment(self, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {**s3_server.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:1"}.items():
            monkeypatch.setenv(name, value)
        store = ObstoreStore(s3_server.url(BUCKET, fresh_prefix()), s3_server.options)
        store.put("a", b"1")
        assert paths(store) == ["a"]

    def test_plain_http_has_to_be_allowed(self, server: Server, url: str) -> None:
        options = {name: value for name, value in server.options.items() if name != "allow_http"}
        assert_refused(url, options, "allow_http=true")

    @pytest.mark.usefixtures("s3_server")  # it starts its own, but skips without
    def test_a_bucket_may_be_part_of_the_host_and_a_proxy_on_the_way(self) -> None:
        with S3Server(domain="s3.test") as server, FaultyProxy("127.0.0.1", server.port) as proxy:
            server.create_bucket(BUCKET)
            plain = ObstoreStore(server.url(BUCKET, "x"), server.options)
            plain.put("a", b"1")
            options = {
                **server.options,
                "endpoint": f"http://{BUCKET}.s3.test",
                "virtual_hosted_style_request": "true",
                "proxy_url": proxy.endpoint,
            }
            store = ObstoreStore(server.url(BUCKET, "x"), options)
            assert content(store, "a") == b"1"
            store.put_if("a", b"2", Match(store.get("a").version))
            assert paths(store) == ["a"]
            assert content(plain, "a") == b"2"
            assert {seen.headers["host"] for seen in proxy.seen} == {f"{BUCKET}.s3.test"}


class TestBeingRefused:
    def test_a_wrong_secret_says_to_check_the_credentials(self, server: Server, url: str) -> None:
        name = "secret_access_key" if isinstance(server, S3Server) else "account_key"
        assert_refused(url, {**server.options, name: "d3Jvbmc="}, "check the credentials")

    def test_an_unknown_user_is_no_missing_object(self, server: Server, url: str) -> None:
        name = "access_key_id" if isinstance(server, S3Server) else "account_name"
        # This S3 server says 404 where Amazon says 403; it must not be taken for an absent object.
        word = "No user exists" if isinstance(server, S3Server) else "check the credentials"
        assert_refused(url, {**server.options, name: "nobody"}, word)

    def test_a_machine_without_credentials_outside_every_cloud_raises(self, s3_server: S3Server) -> None:
        nobody = {"endpoint": s3_server.endpoint, "allow_http": "true", "region": s3_server.region}
        url = s3_server.url(BUCKET, fresh_prefix())
        closed = f"http://127.0.0.1:{free_port()}"
        assert_refused(url, {**nobody, "metadata_endpoint": closed}, "no credentials were given")
        with FaultyProxy("127.0.0.1", s3_server.port) as cloud:
            cloud.fail_next(answer(503, "SlowDown"))
            with pytest.raises(TransientStorageError, match="no credentials were given"):
                ObstoreStore(url, {**nobody, "metadata_endpoint": cloud.endpoint}).get("a")

    def test_a_wrong_region_is_named_by_the_store(self, s3_server: S3Server) -> None:
        url = s3_server.url(BUCKET, fresh_prefix())
        assert_refused(url, {**s3_server.options, "region": "eu-west-9"}, s3_server.region)

    def test_a_missing_bucket_says_to_create_it(self, server: Server) -> None:
        assert_refused(server.url("no-such-bucket", "log"), server.options, "no bucket", "create it")

    def test_an_account_that_is_not_named_is_an_error_of_the_options(self, azure_server: AzureServer) -> None:
        options = {"endpoint": azure_server.endpoint}
        assert_refused(azure_server.url(BUCKET), options, "Account must be specified", "Correct the options")


class TestLines:
    def test_a_server_that_is_not_there_may_come_back(self, server: Server, url: str) -> None:
        port = free_port()
        store = ObstoreStore(url, server.options_through(f"http://127.0.0.1:{port}"))
        with pytest.raises(TransientStorageError, match="connection refused"):
            store.get("greeting")
        with FaultyProxy("127.0.0.1", server.port, port_here=port):
            assert content(store, "greeting") == b"hello"

    def test_an_unknown_host_is_a_transient_error(self, s3_server: S3Server) -> None:
        store = ObstoreStore(s3_server.url(BUCKET), s3_server.options_through("http://no-such-host.invalid"))
        with pytest.raises(TransientStorageError, match="lookup"):
            store.get("greeting")

    def test_a_server_without_tls_is_an_error_of_the_endpoint(self, server: Server, url: str) -> None:
        options = server.options_through(f"https://127.0.0.1:{server.port}")
        assert_refused(url, options, "does not speak TLS")

    def test_a_line_with_latency_is_a_line_like_any_other(self, s3_server: S3Server) -> None:
        with latency_proxy("127.0.0.1", s3_server.port, 0.001) as endpoint:
            store = open_store(s3_server.url(BUCKET, fresh_prefix()), s3_server.options_through(endpoint))
            store.put("a", b"1")
            with pytest.raises(NotFound):
                store.get("b")
            assert paths(store) == ["a"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for loopback, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no server: the openssl command is needed to make a certificate, install it")
    folder = tmp_path_factory.mktemp("certificate")
    pair = folder / "certificate.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    leaf = ["-addext", "basicConstraints=critical,CA:FALSE"]
    files = ["-out", str(pair[0]), "-keyout", str(pair[1])]
    subprocess.run([openssl, "req", *kind, *names, *leaf, *files], check=True, capture_output=True)
    return pair


@pytest.fixture(scope="module", params=[S3Server, AzureServer])
def tls_server(request: pytest.FixtureRequest, certificate: tuple[Path, Path]) -> Iterator[Server]:
    server = request.param(certificate=certificate)
    with started(server):
        server.create_bucket(BUCKET)
        yield server


class TestTls:
    def test_a_certificate_without_a_trusted_issuer_is_refused(self, tls_server: Server) -> None:
        assert_refused(tls_server.url(BUCKET), tls_server.options, "root_certificate")

    def test_it_is_accepted_with_its_root_certificate(self, tls_server: Server, certificate: tuple[Path, Path]) -> None:
        store = open_store(
            tls_server.url(BUCKET), {**tls_server.options, "root_certificate": certificate[0].read_text()}
        )
        store.put("a", b"1")
        assert content(store, "a") == b"1"

    def test_an_untrusted_certificate_is_accepted_if_the_options_allow_it(self, tls_server: Server) -> None:
        store = open_store(tls_server.url(BUCKET), {**tls_server.options, "allow_invalid_certificates": "true"})
        store.put("b", b"1")
        assert content(store, "b") == b"1"


class TestServers:
    @pytest.mark.usefixtures("s3_server")
    @pytest.mark.matrix
    def test_a_server_that_was_stopped_is_gone_with_all_it_kept(self) -> None:
        with S3Server() as server:
            folder, port = server.folder, server.port
            assert os.path.isdir(folder)
        assert not os.path.exists(folder)
        with pytest.raises(TransientStorageError, match="connection refused"):
            ObstoreStore(server.url(BUCKET), server.options).get("a")
        assert server.port == port

    @pytest.mark.matrix
    def test_a_server_that_is_not_installed_gives_the_reason_for_skipping(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.servers.HOME", tmp_path)
        with pytest.raises(NoServer, match=r"^no server: versitygw .* 'make services'$"):
            S3Server().start()
