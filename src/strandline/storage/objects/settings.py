"""Settings of object stores as they are given: by options, and out of files. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from strandline.errors import InvalidInput
from strandline.model.arguments import shown

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")

_TEXTS: Final = ("certificate", "service_account")
"""Parts of the names of settings whose values are whole files, with line breaks."""


def store_settings(options: Mapping[str, str] | None) -> dict[str, str]:
    r"""The settings without the space around their values: a secret out of a mounted file often ends with a line break.

    ``InvalidInput`` for a control character within a value, which no request can hold.

    >>> store_settings({"account_key": "c2VjcmV0\n"})
    {'account_key': 'c2VjcmV0'}
    """
    found = {name: value.strip() for name, value in (options or {}).items()}
    for name, value in found.items():
        is_text = any(part in name.lower() for part in _TEXTS)
        if not is_text and _CONTROL.search(value):
            raise InvalidInput(
                f"The storage option {shown(name)} has a control character, such as a line break, within its value, "
                "which no request can hold: give the value alone."
            )
    return found
