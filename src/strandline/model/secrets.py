"""Which options and parameters hold secrets, by their names. Pure."""

from __future__ import annotations

import re
from typing import Final

NAMED_SECRETS: Final = r"secret|passw(?:or)?d|passphrase|pwd|token|signature|credential|access[_-]?key|api[_-]?key"
"""A regular expression that the names of most secrets match, in options and in the query of an address."""

_SECRET: Final = re.compile(
    rf"{NAMED_SECRETS}|(?:^|[_.-])sas(?:[_.-]|$)|keys?(?:[_.-](?:base64|pem|data|text))?$", re.IGNORECASE
)
_ABOUT_ONE: Final = re.compile(
    r"[_.-](?:id|file|path|location|type|enabled|host|ur[il])$|application_credentials$|skip_signature$", re.IGNORECASE
)
"""Names of what is said about a secret: which one it is, or in which file."""


def is_secret_option(name: str) -> bool:
    """Whether the value of an option is a secret: by its name, with or without that of a cloud, in any case.

    >>> [is_secret_option(name) for name in ("account_key", "AZURE_STORAGE_SAS_TOKEN", "sse_customer_key_base64")]
    [True, True, True]
    >>> [is_secret_option(name) for name in ("aws_access_key_id", "application_credentials", "region")]
    [False, False, False]
    """
    return _SECRET.search(name) is not None and _ABOUT_ONE.search(name) is None
