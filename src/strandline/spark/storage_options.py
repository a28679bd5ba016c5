"""Options of the object store among those of the data source, and secrets that Spark must not show. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.addresses import has_credentials, is_secret_option, refuse_credentials
from strandline.model.arguments import shown

STORAGE_PREFIX: Final = "storage."
"""Options with this prefix are passed on to the object store, without the prefix."""

REDACTED_PREFIX: Final = "storage.secret."
"""The same, for secrets: Spark leaves the values of options with such names out of plans, event logs and its UI."""

_REDACTED: Final = re.compile(r"secret|password|token|access[.]?key|url", re.IGNORECASE)
"""Names of options that Spark redacts: the defaults of spark.redaction.regex and spark.sql.redaction.options.regex."""


def storage_options(given: Mapping[str, str]) -> dict[str, str]:
    """The options of the object store; ``InvalidInput`` for a secret that Spark would show.

    >>> storage_options({"storage.region": "eu", "storage.secret.account_key": "c2VjcmV0"})
    {'region': 'eu', 'account_key': 'c2VjcmV0'}
    """
    refuse_shown_secrets(given)
    found = {name.lower(): value for name, value in given.items() if name.lower().startswith(STORAGE_PREFIX)}
    return {_store_option(name): value for name, value in found.items()}


def refuse_shown_secrets(options: Mapping[str, str]) -> None:
    """``InvalidInput`` for a secret under a name that Spark does not redact; the error omits its value."""
    for name, value in options.items():
        if not name.lower().startswith(STORAGE_PREFIX):
            refuse_credentials(value, "set the environment variables of the cloud (such as AWS_ACCESS_KEY_ID)")
        if _is_shown_secret(name, value):
            raise InvalidInput(
                f"Spark writes the option {shown(name)} into its plans and event logs, where its value is no secret "
                f"any more: name it {REDACTED_PREFIX + _store_option(name.lower())!r}, which Spark redacts, or set the "
                "environment variable of the cloud on each machine."
            )


def with_redacted_names(options: Mapping[str, str]) -> dict[str, str]:
    """The options, with each secret under a name that Spark redacts.

    >>> with_redacted_names({"storage.account_key": "c2VjcmV0", "partitions": "4"})
    {'storage.secret.account_key': 'c2VjcmV0', 'partitions': '4'}
    >>> with_redacted_names({"STORAGE.account_key": "c2VjcmV0"})
    {'storage.secret.account_key': 'c2VjcmV0'}
    """
    return {
        REDACTED_PREFIX + _store_option(name.lower()) if _is_shown_secret(name, value) else name: value
        for name, value in options.items()
    }


def _is_shown_secret(name: str, value: str) -> bool:
    if not name.lower().startswith(STORAGE_PREFIX) or _REDACTED.search(name):
        return False
    return is_secret_option(name) or has_credentials(value)


def _store_option(name: str) -> str:
    return name.removeprefix(REDACTED_PREFIX).removeprefix(STORAGE_PREFIX)
