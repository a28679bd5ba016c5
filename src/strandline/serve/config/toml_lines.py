"""The line of each key of a TOML text. The standard parser names a line only where the syntax is wrong."""

from __future__ import annotations

import tomllib
from typing import Final, TypeAlias, final

KeyPath: TypeAlias = tuple[str | int, ...]
"""The names of tables and keys from the top; numbers are places in arrays."""

_QUOTES: Final = ('"""', "'''", '"', "'")
_ENDS: Final = ",]}#\r\n"


def toml_lines(text: str) -> dict[KeyPath, int]:
    r"""The line of each key and table, counted from 1, of a text that ``tomllib`` has accepted.

    >>> toml_lines('[logs.orders]\naddress = "x"\ncold = { every = "1m" }\n')[("logs", "orders", "cold", "every")]
    3
    """
    return _Scan(text).lines()


@final
class _Scan:
    """One pass over a valid text; values are skipped, tables in them are entered."""

    def __init__(self, text: str) -> None:
        self._text = text + "\n"
        self._at = 0
        self._line = 1
        self._found: dict[KeyPath, int] = {}
        self._counts: dict[KeyPath, int] = {}
        """How often each array of tables was begun."""

    def lines(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        while True:
            self._skip(blank=True)
            if self._at >= len(self._text):
                return self._found
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _header(self) -> KeyPath:
        is_array = self._text.startswith("[[", self._at)
        line = self._line
        self._move(2 if is_array else 1)
        names = self._key("]")
        self._move(2 if is_array else 1)
        path = self._placed(names if not is_array else names[:-1])
        if is_array:
            path = (*path, names[-1])
            self._counts[path] = self._counts.get(path, -1) + 1
            self._note(path, line)
            path = (*path, self._counts[path])
        self._note(path, line)
        return path

    def _placed(self, names: list[str]) -> KeyPath:
        """A path of names, with the newest place in each array of tables on its way."""
        path: KeyPath = ()
        for name in names:
            path = (*path, name)
            if path in self._counts:
                path = (*path, self._counts[path])
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line
        path: KeyPath = (*table, *self._key("="))
        self._move(1)
        self._note(path, line, since=len(table) + 1)
        self._value(path)

    def _key(self, end: str) -> list[str]:
        """The names of a dotted key, up to the sign behind it."""
        names: list[str] = []
        while True:
            self._skip()
            letter = self._text[self._at]
            if letter == end:
                return names
            if letter == ".":
                self._move(1)
            elif letter in "\"'":
                names.append(self._quoted())
            else:
                since = self._at
                while self._text[self._at] not in f". \t{end}":
                    self._move(1)
                names.append(self._text[since : self._at])

    def _quoted(self) -> str:
        since = self._at
        self._string()
        name: str = tomllib.loads(f"x = {self._text[since : self._at]}")["x"]
        return name

    def _value(self, path: KeyPath) -> None:
        self._skip()
        letter = self._text[self._at]
        if letter in "\"'":
            self._string()
        elif letter == "[":
            self._items(path, "]")
        elif letter == "{":
            self._items(path, "}")
        else:
            while self._text[self._at] not in _ENDS:
                self._move(1)

    def _items(self, path: KeyPath, end: str) -> None:
        """The values of an array, or the pairs of an inline table."""
        self._move(1)
        count = 0
        while True:
            self._skip(blank=True)
            letter = self._text[self._at]
            if letter == end:
                self._move(1)
                return
            if letter == ",":
                self._move(1)
            elif end == "]":
                self._note((*path, count), self._line)
                self._value((*path, count))
                count += 1
            else:
                self._pair(path)

    def _string(self) -> None:
        quote = next(quote for quote in _QUOTES if self._text.startswith(quote, self._at))
        self._move(len(quote))
        while not self._text.startswith(quote, self._at):
            is_escape = quote[0] == '"' and self._text[self._at] == "\\"
            self._move(2 if is_escape else 1)
        self._move(len(quote))
        if len(quote) > 1:  # up to two more quotes belong to the text
            while self._text[self._at] == quote[0]:
                self._move(1)

    def _skip(self, *, blank: bool = False) -> None:
        """Skip spaces; with ``blank`` also line breaks and comments."""
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter in " \t" or (blank and letter in "\r\n"):
                self._move(1)
            elif blank and letter == "#":
                while self._text[self._at] != "\n":
                    self._move(1)
            else:
                return

    def _move(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _note(self, path: KeyPath, line: int, since: int = 1) -> None:
        """Note where a key is; tables that it implies are where they are named first."""
        for length in range(since, len(path) + 1):
            self._found.setdefault(path[:length], line)
