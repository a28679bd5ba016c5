"""Which cases of a long parametrisation the default suite runs; the whole matrix runs all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_CI = bool(os.environ.get("CI"))


def some(cases: Iterable[Any], count: int) -> list[Any]:
    """All cases, of which the default suite runs this many, spread over the whole range; the rest is ``matrix``.

    >>> [case for case in some(range(10), 3) if isinstance(case, int)]
    [0, 4, 9]
    """
    listed = list(cases)
    last, gaps = len(listed) - 1, max(count - 1, 1)
    kept = {last * number // gaps for number in range(count)}
    return [case if index in kept else _left_out(case) for index, case in enumerate(listed)]


def examples(count: int) -> int:
    """How many generated examples a test tries: all of them in CI, and a fifth of them elsewhere, but ten at least."""
    return count if IS_CI else max(10, count // 5)


def parts(count: int, *, kept: int) -> list[Any]:
    """The parts of a long schedule: the first one by default, each multiple of ``kept`` in the matrix, the rest slow.

    >>> [part for part in parts(6, kept=3) if isinstance(part, int)]
    [0]
    """
    marks = {part: pytest.mark.slow if part % kept else pytest.mark.matrix for part in range(1, count)}
    return [0, *(pytest.param(part, marks=mark) for part, mark in marks.items())]


def sampled(every: int, *, matrix: int = 1) -> list[Any]:
    """Every ``every``-th point for the default suite, and each ``matrix``-th for the matrix; the slow suite has all."""
    some, more = pytest.param(every, id="some"), pytest.param(matrix, id="more", marks=pytest.mark.matrix)
    all_ = pytest.param(1, id="all", marks=pytest.mark.matrix if matrix == 1 else pytest.mark.slow)
    return [some, all_] if matrix == 1 else [some, more, all_]


def partly(few: Any, everything: Any) -> list[Any]:
    """Two cases: few rounds, places or kills for the default suite, and all of them for the matrix."""
    return [pytest.param(few, id="some"), pytest.param(everything, id="all", marks=pytest.mark.matrix)]


def thin_contracts(items: Iterable[pytest.Item]) -> None:
    """Of a contract suite, leave cases to the matrix that another implementation runs by default.

    The first implementation runs all cases of each test, every other one the first and the last of them.
    """
    groups: dict[tuple[object, ...], dict[tuple[object, ...], list[pytest.Item]]] = {}
    for item in items:
        if (of := _case_of_contract(item)) is not None and not item.get_closest_marker("matrix"):
            test, implementation = of
            groups.setdefault(test, {}).setdefault(implementation, []).append(item)
    for implementations in groups.values():
        for cases in list(implementations.values())[1:]:
            for item in cases[1:-1]:
                item.add_marker(pytest.mark.matrix)


def _case_of_contract(item: pytest.Item) -> tuple[tuple[object, ...], tuple[object, ...]] | None:
    """The test of a contract suite that a parametrised item is a case of, and what it runs on."""
    if not isinstance(item, pytest.Function) or item.cls is None or not hasattr(item, "callspec"):
        return None
    defined = next((base for base in item.cls.__mro__ if item.originalname in vars(base)), item.cls)
    if not defined.__module__.startswith(("strandline.testing.", "tests.contracts.")):
        return None
    own = {name.strip() for mark in item.iter_markers("parametrize") for name in _names(mark.args[0])}
    fixtures = tuple(sorted((name, at) for name, at in item.callspec.indices.items() if name not in own))
    return (defined, item.originalname), (item.cls, fixtures)


def _names(arguments: str | Iterable[str]) -> Iterable[str]:
    return arguments.split(",") if isinstance(arguments, str) else arguments


def _left_out(case: Any) -> Any:
    if hasattr(case, "marks"):  # it is a pytest.param already
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.matrix], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.matrix)
