"""Reads a server's file: settings, or one sentence with file and line. Pure, apart from the file itself."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args, get_type_hints

import msgspec

from strandline.errors import InvalidInput, NotFound
from strandline.model.addresses import is_plain_name, is_secret_option, refuse_credentials
from strandline.model.cursor import parse_start
from strandline.serve.config.settings import OF_MANY, Section, Settings, TableSection
from strandline.serve.config.toml_lines import KeyPath, toml_lines
from strandline.serve.config.values import Secret, decoded
from strandline.storage.disk import Disk
from strandline.tables.routes.named import NAME, label_at, names_beside

_AT: Final = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_TYPES: Final = {
    " | null": "",
    "`str": "`text",
    "`int": "`whole number",
    "`bool": "`true or false",
    "`object": "`table",
    "`float": "`number",
}
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read: its settings, and the line of each that is written there."""

    path: str
    text: str
    settings: Settings
    lines: Mapping[KeyPath, int]
    written: Mapping[str, Any]
    """The tables of the file, as they are written."""


def read_config(path: str, disk: Disk) -> ConfigFile:
    """The settings in a file; ``InvalidInput`` for anything that is wrong in it."""
    try:
        text = disk.read(path).decode()
    except NotFound as error:
        raise NotFound(f"There is no file {path}: name the file with the settings of the server.") from error
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is no TOML file: it is not UTF-8.") from None
    return parse_config(text, path)


def parse_config(text: str, path: str) -> ConfigFile:
    r"""The settings in a text; ``InvalidInput`` with file, line and the nearest valid name.

    >>> parse_config('[http]\nlisten = "127.0.0.1:0"\n', "strandline.toml").settings.http.listen
    '127.0.0.1:0'
    >>> parse_config('[http]\nlisen = "127.0.0.1:0"\n', "strandline.toml")
    Traceback (most recent call last):
    strandline.errors.InvalidInput: strandline.toml:2: [http] has no setting 'lisen': did you mean 'listen'?
    """
    try:
        written = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{path} is no TOML: {error}.") from error
    except RecursionError as error:
        raise InvalidInput(f"{path} is no file of settings: its values are nested too deeply.") from error
    return _FileReader(path, text, written, toml_lines(text)).read()


@dataclass(frozen=True, slots=True)
class _FileReader:
    path: str
    text: str
    written: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def read(self) -> ConfigFile:
        sections: dict[str, Any] = {}
        for name, kind in get_type_hints(Settings).items():
            if name not in self.written:
                continue
            found = self.written[name]
            if name in OF_MANY:
                if not isinstance(found, dict):
                    raise self._refusal((name,), f"[{name}] is a table of tables: write [{name}.NAME]")
                sections[name] = {each: self._part(name, each, value) for each, value in found.items()}
            else:
                sections[name] = self._converted(found, _section_in(kind), (name,))
        for name in self.written:
            if name not in sections:
                raise self._refusal((name,), f"there is no section [{name}]{_nearest(name, get_type_hints(Settings))}")
        settings = Settings(**sections)
        self._check_references(settings)
        self._check_values(settings)
        return ConfigFile(self.path, self.text, settings, self.lines, self.written)

    def _part(self, section: str, name: str, value: Any) -> Any:
        if not is_plain_name(name):
            raise self._refusal(
                (section, name), f"{name[:200]!r} is no name: use letters, digits, '.', '_' and '-' in [{section}.NAME]"
            )
        if not isinstance(value, dict):
            raise self._refusal((section, name), f"{name!r} is no table: write [{section}.NAME] above it")
        return self._converted(value, OF_MANY[section], (section, name))

    def _converted(self, value: Any, kind: type[Section], path: KeyPath) -> Any:
        try:
            return msgspec.convert(value, kind, dec_hook=decoded)
        except msgspec.ValidationError as error:
            raise self._explained(str(error), kind, path) from error

    def _explained(self, said: str, kind: type[Section], path: KeyPath) -> InvalidInput:
        """What msgspec has said, as a sentence with a line. It does not name the key of a value in a table."""
        found = _AT.fullmatch(said)
        what, below = (said, "") if found is None else (found[1], found[2] or "")
        for name, number in _STEP.findall(below):
            if number == "...":
                break
            path = (*path, int(number) if number else name)
        table = shown_path(path)
        if unknown := _UNKNOWN.fullmatch(what):
            near = _nearest(unknown[1], _settings_at(kind, path))
            return self._refusal((*path, unknown[1]), f"[{table}] has no setting {unknown[1][:200]!r}{near}")
        if missing := _MISSING.fullmatch(what):
            return self._refusal(path, f"[{table}] needs the setting {missing[1]!r}")
        if what.startswith("Invalid enum value"):
            known = [each for part in get_args(_hint_at(kind, path)) for each in get_args(part) or (part,)]
            what += f": it is {' or '.join(repr(each) for each in known if isinstance(each, str))}"
        return self._refusal(path, f"{table} cannot be used: {_in_words(what)}")

    def _check_references(self, settings: Settings) -> None:
        """``InvalidInput`` for a log that another section names, and that there is not."""
        named = [("ingest", name, key, getattr(one, key)) for name, one in settings.ingest.items() for key in _ENDS]
        named += [("tables", name, "log", one.log) for name, one in settings.tables.items()]
        named += [("snapshots", name, "log", one.log) for name, one in settings.snapshots.items()]
        for section, name, key, given in named:
            if given not in settings.logs and "://" not in given and "/" not in given:
                near = _nearest(given, settings.logs) or ": add [logs.NAME], or write an address, such as ./orders."
                raise self._refusal((section, name, key), f"there is no log {given[:200]!r} in this file{near}")

    def _check_values(self, settings: Settings) -> None:
        for path, value in leaves(settings):
            try:
                if isinstance(value, str) and "://" in value:
                    refuse_credentials(value, "give them in the environment, or as options with { env = … }")
                if path[-1] == "start":
                    parse_start(str(value))
            except InvalidInput as error:
                raise self._refusal(path, str(error)) from None
            if len(path) > 1 and path[-2] in ("options", "config") and isinstance(value, str):
                key = str(path[-1])
                if is_secret_option(key.replace(".", "_")):
                    raise self._refusal(
                        path, f'{key} is a secret, and is not written here: use {{ env = "NAME" }} or {{ file = … }}'
                    )
        self._check_together(settings)

    def _check_together(self, settings: Settings) -> None:
        if "*" in settings.http.origins and settings.security.tokens is None:
            raise self._refusal(
                ("http", "origins"),
                "every page that somebody opens could read and append: list origins, or give tokens",
            )
        for name, log in settings.logs.items():
            path: KeyPath = ("logs", name)
            if log.node is not None and (log.trim is not None or log.options or (log.create and log.node.upstream)):
                key = "trim" if log.trim is not None else "options" if log.options else "create"
                why = "its primary trims the log" if key == "trim" else "a node has its log in its folder, or gets it"
                raise self._refusal((*path, key), f"{key} is not for a node: {why}")
            if log.node is None and _is_wal(log.address) and log.retention is not None and log.trim is None:
                raise self._refusal(
                    (*path, "retention"),
                    "the process that writes a write-ahead log trims it: say how often by trim, such as '10m'",
                )
        for name, table in settings.tables.items():
            self._check_table(("tables", name), table)

    def _check_table(self, path: KeyPath, table: TableSection) -> None:
        if table.raw and table.schema is not None:
            raise self._refusal((*path, "raw"), "schema decodes values: leave out raw")
        if table.envelope is not None and table.schema is None:
            raise self._refusal((*path, "envelope"), "the envelope is around rows: name their schema by schema")
        if table.by is None:
            for key in ("unrouted", "without", "names"):
                if getattr(table, key):
                    raise self._refusal((*path, key), f"{key} is for many tables: say by what, such as by = 'table'")
            if NAME in table.sink:
                raise self._refusal((*path, "sink"), f"the address has {NAME}: say by 'by' where the names are")
            return
        if not table.follow:
            raise self._refusal((*path, "follow"), "many tables are followed here, or not at all: leave out follow")
        if NAME not in table.sink:
            raise self._refusal((*path, "sink"), f"with by, the tables' address has {NAME} where the name goes")
        if table.names is None and names_beside(table.sink) is None:
            raise self._refusal((*path, "sink"), f"no folder has {NAME} in it: say where names are remembered by names")
        try:
            label_at(table.by)
        except InvalidInput as error:
            raise self._refusal((*path, "by"), str(error)) from None

    def _refusal(self, path: KeyPath, what: str) -> InvalidInput:
        line = next((self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 1)
        return InvalidInput(f"{self.path}:{line}: {what.removesuffix('.')}{'' if what.endswith('?') else '.'}")


_ENDS: Final = ("source", "target")


def _is_wal(address: str) -> bool:
    return address.startswith("wal:")


def leaves(value: Any, path: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """Each setting that has a value, with its path, defaults included; those of options one by one."""
    if isinstance(value, Section):
        for each in value.__struct_fields__:
            yield from leaves(getattr(value, each), (*path, each))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*path, key))
    elif value is not None:
        yield path, value


def _section_in(kind: Any) -> Any:
    """The structure in the type of a setting, which may be optional."""
    return next((each for each in get_args(kind) if isinstance(each, type) and issubclass(each, Section)), kind)


def _hint_at(kind: Any, path: KeyPath) -> Any:
    """The type of a setting; ``kind`` is the structure of its section."""
    for step in path[2 if path[0] in OF_MANY else 1 :]:
        kind = _section_in(kind)
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            break
        kind = get_type_hints(kind)[str(step)]
    return kind


def _settings_at(kind: Any, path: KeyPath) -> Iterable[str]:
    """The names that are valid in a table: of a section, or else of a secret."""
    found = _section_in(_hint_at(kind, path))
    is_section = isinstance(found, type) and issubclass(found, Section)
    fields: tuple[str, ...] = (found if is_section else Secret).__struct_fields__
    return fields


def _nearest(name: str, names: Iterable[str]) -> str:
    known = list(names)
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": it has {', '.join(known)}." if known else ""


def shown_path(path: KeyPath) -> str:
    """The path of a table or a setting.

    >>> shown_path(("tables", "orders", "key", 1))
    'tables.orders.key[1]'
    """
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _in_words(said: str) -> str:
    """A message of msgspec for people: its types as TOML calls them."""
    for name, word in _TYPES.items():
        said = said.replace(name, word)
    return said[0].lower() + said[1:] if said.startswith("Expected") else said
