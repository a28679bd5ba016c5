"""The settings of a file as they are in force, and where each value comes from. Secrets are never shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strandline.serve.config.reading import ConfigFile, leaves, shown_path
from strandline.serve.config.values import Secret


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting: its name, its value, and where that is written."""

    name: str
    value: Any
    source: str


def shown_settings(config: ConfigFile, environment: Mapping[str, str]) -> list[ShownSetting]:
    r"""Every setting that has a value, in the order of the reference.

    >>> from strandline.serve.config.reading import parse_config
    >>> config = parse_config('[logs.a]\naddress = "./a"\noptions.token = { env = "T" }\n', "x.toml")
    >>> for each in shown_settings(config, {}):
    ...     if each.name.startswith("logs.a.options") or each.name in ("logs.a.address", "http.listen"):
    ...         print(each.name, each.value, each.source, sep=" | ")
    http.listen | 127.0.0.1:7700 | default
    logs.a.address | ./a | x.toml:2
    logs.a.options.token | (hidden) | the environment variable T (not set), by x.toml:3
    """
    shown = []
    for path, value in leaves(config.settings):
        line = config.lines.get(path)
        place = f"{config.path}:{line}"
        if isinstance(value, Secret):
            is_missing = value.env is not None and value.env not in environment
            source = f"{value.source}{' (not set)' if is_missing else ''}, by {place}"
            shown.append(ShownSetting(shown_path(path), "(hidden)", source))
        else:
            plain = list(value) if isinstance(value, tuple) else value
            shown.append(ShownSetting(shown_path(path), plain, "default" if line is None else place))
    return shown
