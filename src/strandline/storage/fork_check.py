"""Fork detection: resources that a process opened are refused in its forked children.

A forked child has a copy of its parent's memory but none of its threads. A lock that a thread held stays locked
forever, no thread flushes queues, and if both processes use the same numbers, offsets or connections, acknowledged
data is lost or duplicated. So every object that holds a store, a file, a thread or a number has an :class:`Origin`, and
its class is :func:`bound_to_process`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, Final, TypeVar

from strandline.errors import UsedAcrossFork

C = TypeVar("C", bound=type)
T = TypeVar("T")

_bound: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
"""Actions in a forked child: a weak reference to each object, and the function to call with it."""

_kept: list[object] = []
"""In a child: objects that its parent had opened."""

_CALLS: Final = frozenset(
    {
        "__aenter__",
        "__aiter__",
        "__anext__",
        "__await__",
        "__call__",
        "__contains__",
        "__enter__",
        "__getitem__",
        "__iter__",
        "__len__",
        "__next__",
    }
)
"""Public methods with private names."""

_ENDS: Final = frozenset({"__exit__", "__aexit__", "__del__"})


class _Token:
    """One process between two forks; process ids may be reused."""

    __slots__ = ()


_here = _Token()


class Origin:
    """The process that opened an object.

    >>> Origin("The log").check()
    """

    __slots__ = ("_advice", "_what", "process", "token")

    def __init__(self, what: str, thing: object | None = None, *, advice: str = "open it again there") -> None:
        """Remember this process. ``what`` is the subject of the error, such as ``"The topic a"``.

        ``advice`` ends the error: what the child should do instead.

        ``thing`` is never garbage-collected in a child: finalizers of native clients and databases flush, or wait for
        threads.
        """
        self.token = _here
        self._what = what
        self._advice = advice
        self.process = os.getpid()
        """The process id."""
        if thing is not None:
            call_in_child(thing, _kept.append)

    @property
    def is_here(self) -> bool:
        """Whether this is the same process."""
        return self.token is _here

    def check(self) -> None:
        """Raise ``UsedAcrossFork`` in a forked child."""
        if self.token is not _here:
            raise self.refusal()

    def refusal(self) -> UsedAcrossFork:
        """The error for a child."""
        return UsedAcrossFork(
            f"{self._what} was opened by the process {self.process} and used in a forked child of it, which changed "
            f"nothing: {self._advice}."
        )


def bound_to_process(
    *, close: Collection[str] = ("close",), keep: Collection[str] = (), own: Collection[str] = ()
) -> Callable[[C], C]:
    """Refuse every public call of a class's instances in a forked child: ``UsedAcrossFork``, before any lock.

    An instance is bound once its ``_origin`` is set. In a child, methods named in ``close`` and the end of a ``with``
    block do nothing: all resources belong to the parent. Pickling and ``repr`` work.

    Args:
        close: Names of methods that end its use.
        keep: Names of methods and properties that a child may use: they return constants.
        own: Names of methods that check by themselves, since they are called for each record.
    """
    ends, left = _ENDS.union(close), frozenset((*keep, *own))

    def bind(kind: C) -> C:
        if not hasattr(kind, "_origin"):
            setattr(kind, "_origin", None)  # noqa: B010 - for an instance under construction
        for name in dir(kind):
            found = inspect.getattr_static(kind, name)
            if name in left or (name.startswith("_") and name not in _CALLS and name not in ends):
                continue
            if isinstance(found, property):
                setattr(kind, name, property(_checked(found.fget, ends=False), found.fset, found.fdel, found.__doc__))
            elif inspect.isfunction(found):
                setattr(kind, name, _checked(found, ends=name in ends))
        return kind

    return bind


def _checked(call: Any, *, ends: bool) -> Any:
    is_coroutine = inspect.iscoroutinefunction(call)

    @functools.wraps(call)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        origin = self._origin
        if origin is None or origin.token is _here:
            return call(self, *args, **options)
        if not ends:
            raise origin.refusal()
        return _nothing() if is_coroutine else None

    return checked


async def _nothing() -> None:
    return None


def call_in_child(thing: T, action: Callable[[T], object]) -> None:
    """Call ``action`` with ``thing`` right after a fork, in the child, if it still exists; holds it only weakly."""
    key = id(thing)
    before = _bound.get(key)
    if before is not None and before[0]() is thing:
        first = before[1]

        def both(here: Any) -> None:
            first(here)
            action(here)

        _bound[key] = (before[0], both)
    else:
        _bound[key] = (weakref.ref(thing, functools.partial(_forget, key)), action)


def _forget(key: int, reference: object) -> None:
    found = _bound.get(key)
    if found is not None and found[0] is reference:  # else the key was reused by another object
        del _bound[key]


def _forked() -> None:
    global _here  # noqa: PLW0603 - one value per process
    _here = _Token()
    if _bound:
        # Uncollected garbage of the parent may be a native client or server, whose finalizer waits for missing threads,
        # or crashes: objects from before the fork are never collected here.
        gc.freeze()
    with ExitStack() as actions:  # calls all actions even if one fails
        for reference, action in list(_bound.values()):
            thing = reference()
            if thing is not None:
                actions.callback(action, thing)


os.register_at_fork(after_in_child=_forked)
