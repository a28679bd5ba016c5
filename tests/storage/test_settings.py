"""Settings of stores as they come out of mounted files: with line breaks, which no request can hold."""

from __future__ import annotations

import pytest

from strandline.errors import InvalidInput, StorageError
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.urls import open_store, store_settings
from tests.servers import free_port

KEYS = {"access_key_id": "me", "secret_access_key": "word", "session_token": "token", "region": "eu"}


def unreachable() -> dict[str, str]:
    return {**KEYS, "endpoint": f"http://127.0.0.1:{free_port()}", "allow_http": "true"}


@pytest.mark.parametrize("space", ["\n", "\r\n", " ", "\t\n"])
def test_space_around_a_setting_is_no_part_of_it(space: str) -> None:
    given = {name: f"{space}{value}{space}" for name, value in KEYS.items()}
    assert store_settings(given) == KEYS


@pytest.mark.parametrize("letter", ["\n", "\x00", "\x7f"])
def test_a_control_character_within_a_setting_is_refused_without_its_value(letter: str) -> None:
    with pytest.raises(InvalidInput, match="'session_token' has a control character") as caught:
        open_store("s3://bucket/log", {**KEYS, "session_token": f"zQ{letter}zQ"})
    assert "zQ" not in str(caught.value)


def test_a_certificate_and_a_service_account_keep_their_lines() -> None:
    given = {"root_certificate": "BEGIN\nEND", "google_service_account_key": '{\n"a": 1}'}
    assert store_settings(given) == given


def test_a_setting_of_the_environment_that_no_request_can_hold_is_an_error_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {name: value for name, value in unreachable().items() if name != "session_token"}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token\n")
    with pytest.raises(StorageError, match="look for line breaks"):
        ObstoreStore("s3://bucket/log", options).get("x")
