"""The line of each key of a TOML text, in whatever layout it is written."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.serve.config.toml_lines import KeyPath, toml_lines

ODD = Path(__file__).with_name("odd.toml").read_text()


def keys(value: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """All paths of a parsed text."""
    if path:
        yield path
    found = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in found:
        yield from keys(each, (*path, name))


def test_keys_have_their_lines_in_an_odd_layout() -> None:
    text = ODD
    assert set(toml_lines(text)) == set(keys(tomllib.loads(text)))
    lines = text.splitlines()
    found = toml_lines(text)
    for path, begins in {
        ("top",): "top",
        ("a.b",): '"a.b"',
        ("logs",): "[ logs",
        ("logs", "or ders", "after"): "after",
        ("logs", "or ders", "list", 1, "inner", "deep"): '  "a,]"',
        ("logs", "or ders", "list", 2, 1): "   2]",
        ("logs", "or ders", "dotted", "in side", "x"): "dotted",
    }.items():
        assert lines[found[path] - 1].startswith(begins), path
    assert found["jobs", 1, "name"] > found["jobs", 0, "detail", "x"] > found["jobs", 0, "name"] > found["jobs",]
    assert lines[found["jobs", 1, "detail", "x"] - 1] == "x = 2"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_of_any_system_count_once(newline: str) -> None:
    text = newline.join(["[a]", "", "x = 1", "", "[b]", "y = 2"])
    assert toml_lines(text) == {("a",): 1, ("a", "x"): 3, ("b",): 5, ("b", "y"): 6}


NAMES = st.sampled_from(["a", "b-c", '"d e"', "'f.g'", '"h\\"i"', "1"])
SCALARS = st.sampled_from(
    ["1", "-2.5", '"x"', "'#'", "true", "1979-05-27T07:32:00Z", '""', '"""\n]"x"""', "'''\n[a]\n'''"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda each: "[\n" + ", # ,\n".join(each) + "]")
        | st.dictionaries(NAMES, inner, max_size=2).map(
            lambda each: "{ " + ", ".join(f"{name} = {value}" for name, value in each.items()) + " }"
        )
    ),
    max_leaves=6,
)
TABLES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=2, unique=True).map(".".join),
    st.dictionaries(NAMES, VALUES, max_size=3),
    max_size=3,
)


@given(TABLES)
def test_every_key_of_a_valid_text_has_a_line(tables: dict[str, dict[str, str]]) -> None:
    text = ""
    for name, pairs in tables.items():
        text += f"[{name}] # [x]\n" + "".join(f"{key} = {value}\n" for key, value in pairs.items())
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # the same table twice
        return
    found = toml_lines(text)
    assert set(found) == set(keys(parsed))
    assert all(1 <= line <= text.count("\n") + 1 for line in found.values())
