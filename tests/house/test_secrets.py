"""Secrets: one list of their names, which knows all options of the stores; and no value that shows one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import InvalidInput
from strandline.model.addresses import is_secret_option
from strandline.storage.objects.urls import open_store

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "strandline"
SECRETS = {
    "_aws": "secret_access_key session_token token sse_customer_key_base64",
    "_azure": "account_key access_key master_key client_secret sas_key sas_token token encryption_key "
    "fabric_session_token",
    "_gcs": "service_account_key bearer_token",
    "_client": "",
}
"""The options that hold secrets, by obstore's modules and without the prefix of their cloud."""
CARRIERS = ("options", "events_options", "storage", "config", "dsn", "password")
"""Fields that hold secrets, or settings with secrets among them."""


def documented_options(module: str) -> Iterator[str]:
    """All names that obstore documents for the options of a store: its own, and those of environment variables."""
    package = find_spec("obstore")
    assert package is not None
    assert package.origin is not None
    text = Path(package.origin).with_name("_store").joinpath(f"{module}.pyi").read_text()
    configs = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name.endswith("Config")]
    for node in configs[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from (name.lower() for name in re.findall(r"`([A-Z0-9]+_[A-Z0-9_]+)`", str(node.value.value)))


@pytest.mark.parametrize("module", SECRETS)
def test_the_list_of_secrets_knows_every_option_of_a_store(module: str) -> None:
    names = set(documented_options(module))
    assert len(names) > 10
    plain = {name: re.sub("^(aws|azure_storage|azure|google)_", "", name) for name in names}
    found = {plain[name] for name in names if is_secret_option(name)}
    assert found == set(SECRETS[module].split())
    assert {plain[name] for name in names if is_secret_option(name.upper())} == found
    assert all(is_secret_option(name) == is_secret_option(plain[name]) for name in names)


def test_an_endpoint_with_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidInput, match="beside endpoint") as caught:
        sl.open("s3://bucket/log", options={"endpoint": "http://me:zQ-word-Qz@127.0.0.1:9"})
    assert "zQ-" not in str(caught.value)
    assert "zQ-" not in repr(open_store("s3://bucket/log", {"proxy_url": "http://me:zQ-word-Qz@proxy"}))


def shown_secrets(modules: Iterable[tuple[str, str]]) -> list[str]:
    """Fields of data classes and tuples that hold secrets, and that their ``repr`` shows."""
    found = []
    for module, source in modules:
        for owner in ast.walk(ast.parse(source)):
            if not isinstance(owner, ast.ClassDef):
                continue
            makers = [ast.unparse(one) for one in (*owner.decorator_list, *owner.bases)]
            if not any(maker.startswith("dataclass") or maker == "NamedTuple" for maker in makers):
                continue
            if any(isinstance(each, ast.FunctionDef) and each.name == "__repr__" for each in owner.body):
                continue
            for each in owner.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and _holds_secret(each):
                    given = "" if each.value is None else ast.unparse(each.value)
                    if "repr=False" not in given:
                        found.append(f"{module}: {owner.name}.{each.target.id}")
    return found


def _holds_secret(field: ast.AnnAssign) -> bool:
    name, kind = field.target.id, ast.unparse(field.annotation)  # type: ignore[union-attr]
    if name in CARRIERS:
        return "str" in kind or "Any" in kind
    return "Secret" in kind or (is_secret_option(name) and kind.partition(" |")[0] == "str" and name not in NO_SECRETS)


NO_SECRETS = {"key", "by_key", "record_key"}
"""Keys of records and of columns."""


@pytest.mark.matrix
def test_no_value_shows_its_secrets() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 400
    assert shown_secrets((str(file.relative_to(PACKAGE)), file.read_text()) for file in files) == []


def test_a_shown_secret_is_found() -> None:
    source = (
        "@dataclass(frozen=True)\nclass Access:\n    url: str\n    token: str\n"
        "    options: Mapping[str, str] | None = None\n    dsn: str = field(repr=False)\n"
    )
    assert shown_secrets([("a.py", source)]) == ["a.py: Access.token", "a.py: Access.options"]
