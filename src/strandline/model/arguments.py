"""Arguments of public calls: checked against the call's own signature, and refused in one sentence.

:func:`checked` derives the checks from annotations, so that a signature states them once, for the
reader, for the type checker and for callers without one. Special meanings:

- ``int`` is a whole number from 0 up to 2⁶³ - 1 and no truth value, :data:`Positive` one from 1, :data:`Signed` any of
  64 bits;
- ``float`` is a time in seconds, from 0 up to :data:`LONGEST`, or less with :func:`seconds`; :data:`Duration` is
  above 0, and :data:`Timeout` may be below 0, which does not wait;
- ``str`` is text that can be written as UTF-8, of up to :data:`LONGEST_TEXT` characters; :data:`Named` is not empty,
  :data:`Prose` of any length, and :data:`Secret` is never repeated;
- a protocol is any object with one of its methods, except for built-in types.

All checks are cheap: elements of a sequence of bytes are not checked here, but by the call, all at once
(:func:`~strandline.model.records.values_bytes`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, overload

from strandline.errors import InvalidInput, printable

C = TypeVar("C", bound=Callable[..., Any])

LARGEST_NUMBER: Final = (1 << 63) - 1
"""The largest offset, term, epoch, count or time."""
LONGEST: Final = 10**9
"""The longest time in seconds, about thirty years: longer waits overflow the system's clocks."""
LONGEST_TEXT: Final = 4096
_SHOWN: Final = 60

_A_LOG: Final = "a Log (sl.open(address) opens one)"
_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "Codec": "a Codec such as sl.values.Json(schema)",
    "Log": _A_LOG,
    "LogReading": _A_LOG,
    "MaintainedTable": "a table's sink (sl.tables.existing(address) gives it)",
    "Prefix": "a Prefix such as sl.kv.Prefix(b'orders.')",
    "RecordBatch": "a pyarrow.RecordBatch (log.producer() appends single records)",
    "Shipper": "a Shipper (log.producer() makes a producer)",
    "Sink": "a Sink such as sl.DeltaSink(path)",
    "Table": "a pyarrow.Table",
    "Watcher": "a Watcher such as sl.kv.LogKeyValue(log)",
    "WriterId": "a UUID (log.producer() numbers appends by itself)",
}
"""Classes whose name alone does not say how to get an instance."""


class ArgumentKind(NamedTuple):
    """A kind of argument: a test of values, and its description in an error."""

    admits: Callable[[Any], bool]
    description: str
    is_secret: bool = False

    def check(self, value: Any, what: str) -> Any:
        """The value, if it is of this kind; ``what`` is the subject of the error."""
        if not self.admits(value):
            found = f"a {type(value).__name__} that is not shown" if self.is_secret else shown(value)
            raise InvalidInput(f"{what} is {self.description}, not {found}.")
        return value


def _either(names: Iterable[str]) -> str:
    *some, last = dict.fromkeys(names)
    return f"{', '.join(some)} or {last}" if some else last


def with_article(name: str) -> str:
    """A noun with its article.

    >>> with_article("ObjectLog"), with_article("UUID")
    ('an ObjectLog', 'a UUID')
    """
    return f"an {name}" if name[0] in "AEIOaeio" else f"a {name}"


def whole(least: int = 0, most: int = LARGEST_NUMBER) -> ArgumentKind:
    """Whole numbers within these bounds; no truth values."""

    def admits(value: Any) -> bool:
        return isinstance(value, int) and value is not True and value is not False and least <= value <= most

    return ArgumentKind(admits, f"a whole number from {_number(least)} up to {_number(most)}")


def _number(value: int) -> str:
    return {LARGEST_NUMBER: "2**63 - 1", -LARGEST_NUMBER - 1: "-2**63"}.get(value, str(value))


def seconds(least: float = 0, most: float = LONGEST, *, above: float | None = None) -> ArgumentKind:
    """Times in seconds within these bounds: no truth value, not NaN."""

    def admits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most and (above is None or value > above)

    return ArgumentKind(
        admits, f"a number of seconds {f'from {least}' if above is None else f'above {above}'} up to {most}"
    )


def text(least: int = 0, most: int | None = LONGEST_TEXT, *, is_secret: bool = False) -> ArgumentKind:
    """Texts of ``least`` to ``most`` characters that can be written as UTF-8."""

    def admits(value: Any) -> bool:
        has_length = isinstance(value, str) and least <= len(value) and (most is None or len(value) <= most)
        return has_length and _is_writable(value)

    lengths = ("" if most is None else f" of up to {most} characters") + (" that is not empty" if least else "")
    return ArgumentKind(admits, f"text{lengths}", is_secret)


def anything(description: str) -> ArgumentKind:
    """Any value: the call itself checks it."""
    return ArgumentKind(lambda _: True, description)


def one_of(*values: object) -> ArgumentKind:
    """Exactly one of these."""
    kinds = tuple(type(value) for value in values)
    return ArgumentKind(lambda value: type(value) in kinds and value in values, _either(map(repr, values)))


def instance(kind: type) -> ArgumentKind:
    """Instances of a class; for a protocol, any object with one of its methods that is no built-in type.

    An implementation may omit methods that are never called: a reader that only lists is enough for a resync.
    """
    description = _DESCRIPTIONS.get(kind.__name__) or with_article(kind.__name__)
    if not getattr(kind, "_is_protocol", False):
        return ArgumentKind(lambda value: isinstance(value, kind), description)
    bases = [base for base in kind.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base)) if name[0] != "_"}

    def admits(value: Any) -> bool:  # by its class: reading a property may have side effects
        if isinstance(value, type):  # methods of instances are plain functions of a class
            return all(not inspect.isfunction(inspect.getattr_static(value, name, instance)) for name in names)
        own, held = type(value), getattr(value, "__dict__", ())
        is_proxy = hasattr(own, "__getattr__") and getattr(own, "_answers_every_name", True)
        return own.__module__ != "builtins" and (is_proxy or any(hasattr(own, one) or one in held for one in names))

    return ArgumentKind(admits, description)


Positive = Annotated[int, whole(1)]
Port = Annotated[int, whole(0, 65535)]
SIGNED: Final = whole(-LARGEST_NUMBER - 1)
Signed = Annotated[int, SIGNED]
Duration = Annotated[float, seconds(above=0)]
TIMEOUT: Final = seconds(-LONGEST)
Timeout = Annotated[float, TIMEOUT]
Named = Annotated[str, text(1)]
Prose = Annotated[str, text(most=None)]
Secret = Annotated[str, text(is_secret=True)]

_PLAIN: Final[dict[Any, ArgumentKind]] = {
    NoneType: one_of(None),
    bool: one_of(True, False),
    int: whole(),
    float: seconds(),
    str: text(),
    bytes: ArgumentKind(lambda value: isinstance(value, bytes | bytearray | memoryview), "bytes"),
    PathLike: ArgumentKind(lambda value: isinstance(value, PathLike), "a path object"),
    Callable: ArgumentKind(callable, "a function"),
    type: ArgumentKind(inspect.isclass, "a class"),
}


def kind_of(hint: Any) -> ArgumentKind | None:  # noqa: PLR0911 - one answer for each form of an annotation
    """The kind of an annotation; None for any value.

    >>> kind_of(Literal["now"] | int | None).description
    "'now', a whole number from 0 up to 2**63 - 1 or None"
    """
    if hasattr(hint, "__supertype__"):  # a NewType
        kind, description = kind_of(hint.__supertype__), _DESCRIPTIONS.get(hint.__name__)
        return kind if kind is None or description is None else kind._replace(description=description)
    origin, parameters = get_origin(hint), get_args(hint)
    if (plain := _PLAIN.get(NoneType if hint is None else origin or hint)) is not None:
        return plain
    if origin is Annotated:
        return next((extra for extra in hint.__metadata__ if isinstance(extra, ArgumentKind)), None) or kind_of(
            parameters[0]
        )
    if origin is Literal:
        return one_of(*parameters)
    if origin in (Union, UnionType):
        return _union([kind_of(member) for member in parameters])
    if isinstance(origin, type):
        return _container(origin, parameters)
    return instance(hint) if isinstance(hint, type) and hint not in (object, Any) else None


def _union(kinds: Sequence[ArgumentKind | None]) -> ArgumentKind | None:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds):
        return None
    tests = tuple(kind.admits for kind in known)

    def admits(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - any() would take several times as long
            if test(value):
                return True
        return False

    return ArgumentKind(
        admits,
        _either(kind.description.replace(" or ", ", ") for kind in known),
        any(kind.is_secret for kind in known),
    )


def _container(origin: type, parameters: tuple[Any, ...]) -> ArgumentKind:
    if origin is tuple and Ellipsis not in parameters:
        kinds = [kind_of(parameter) for parameter in parameters]
        description = f"a tuple of {' and '.join(map(_describe, kinds))}"
        return ArgumentKind(
            lambda value: isinstance(value, tuple) and len(value) == len(kinds) and _all(kinds, value), description
        )
    if origin is Mapping:
        items = [kind_of(Prose if parameter is str else parameter) for parameter in parameters]
        description = f"a mapping of {' to '.join(map(_describe, items))}"
        return ArgumentKind(
            lambda value: isinstance(value, Mapping) and all(_all(items, item) for item in value.items()), description
        )
    if not issubclass(origin, Iterable):
        return instance(origin)
    names = kind_of(str) if parameters == (str,) else None

    def admits(value: Any) -> bool:
        is_one = isinstance(value, origin) and not isinstance(value, str | bytes)
        return is_one and (names is None or all(map(names.admits, value)))

    return ArgumentKind(admits, f"{with_article(origin.__name__.lower())} of {_describe(names)}")


def _describe(kind: ArgumentKind | None) -> str:
    return "values" if kind is None else kind.description


def _all(kinds: Iterable[ArgumentKind | None], values: Iterable[Any]) -> bool:
    return all(kind is None or kind.admits(value) for kind, value in zip(kinds, values, strict=True))


@overload
def checked(call: C) -> C: ...


@overload
def checked(*, own: Iterable[str]) -> Callable[[C], C]: ...


def checked(call: Any = None, *, own: Iterable[str] = ()) -> Any:
    """Check the arguments of a call before it runs: ``InvalidInput`` names the argument.

    For a class: of its constructor and of every public method that it defines, or that a protocol defines for it.

    Args:
        call: A function, a method, or a class.
        own: Names of methods of the class that check by themselves, since they are called for each record.

    >>> @checked
    ... def wait(timeout: float | None) -> None: ...
    >>> wait(float("nan"))
    Traceback (most recent call last):
    strandline.errors.InvalidInput: timeout is a number of seconds from 0 up to 1000000000 or None, not nan.
    """
    if call is None:
        return functools.partial(checked, own=own)
    if not isinstance(call, type):
        return _checked(call)
    defining = [call, *(base for base in call.__mro__[1:] if getattr(base, "_is_protocol", False))]
    for method, found in [item for kind in defining for item in vars(kind).items()]:
        if method in own or (method.startswith("_") and method != "__init__"):
            continue
        if inspect.getattr_static(call, method) is not found:
            continue  # a class in between defines it, and checks it
        function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if inspect.isfunction(function):
            checking = _checked(function)
            setattr(call, method, type(found)(checking) if function is not found else checking)
    return call


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    kinds: dict[str, ArgumentKind] = {}
    positional: list[tuple[str, ArgumentKind | None]] = []
    is_known = False

    @functools.wraps(call)
    def checked_call(*args: Any, **options: Any) -> Any:
        nonlocal is_known
        if not is_known:  # at the first call: annotations may refer to later definitions
            _learn(call, kinds, positional)
            is_known = True
        for (parameter, kind), value in zip(positional, args, strict=False):
            if kind is not None and not kind.admits(value):
                kind.check(value, parameter)
        for parameter, value in options.items():
            if (named := kinds.get(parameter)) is not None and not named.admits(value):
                named.check(value, parameter)
        return call(*args, **options)

    return checked_call


def _learn(
    call: Callable[..., Any], kinds: dict[str, ArgumentKind], positional: list[tuple[str, ArgumentKind | None]]
) -> None:
    hints = inspect.get_annotations(inspect.unwrap(call), eval_str=True)
    found = []
    for parameter in inspect.signature(call).parameters.values():
        kind = kind_of(hints[parameter.name]) if parameter.name in hints else None
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if kind is not None and parameter.kind is not parameter.VAR_POSITIONAL:
            kinds[parameter.name] = kind
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or parameter.kind is parameter.POSITIONAL_ONLY:
            found.append((parameter.name, kind))
    positional[:] = found


def shown(value: object) -> str:
    """The value in an error: short, without control characters, and without possible secrets."""
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {len(value)}"
    is_cut = isinstance(value, str | bytes) and len(value) > _SHOWN
    if isinstance(value, str) and "://" in value:  # addresses may hold credentials
        value, is_cut = value[: value.index("://") + 3], True
    try:
        found = repr(value[:_SHOWN] if isinstance(value, str | bytes) else value)
    except Exception:  # noqa: BLE001 - a number with too many digits, or a failing repr
        return f"a {type(value).__name__}"
    found = printable(found)
    return f"{found[: _SHOWN + 40]}…" if is_cut or len(found) > _SHOWN + 40 else found


def _is_writable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
