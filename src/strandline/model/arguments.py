"""Ranges of the arguments of public calls: checked against the call's own signature, and refused in one sentence.

:func:`checked` derives the checks from annotations, so that a signature states them once, for the reader and for the
type checker. Special meanings:

- ``int`` is a whole number from 0 up to 2⁶³ - 1 and no truth value, :data:`Positive` one from 1, :data:`Signed` any of
  64 bits;
- ``float`` is a time in seconds, from 0 up to :data:`LONGEST`, or less with :func:`seconds`; :data:`Duration` is
  above 0, and :data:`Timeout` may be below 0, which does not wait;
- ``str`` is text that can be written as UTF-8, of up to :data:`LONGEST_TEXT` characters; :data:`Named` is not empty,
  :data:`Prose` of any length, and :data:`Secret` is never repeated;
- a class is one of its instances; a text is no sequence.

A protocol, or anything that may be one, is left to the type checker, and so is what is in a container.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, overload

import msgspec

from strandline.errors import InvalidInput, printable

C = TypeVar("C", bound=Callable[..., Any])

LARGEST_NUMBER: Final = (1 << 63) - 1
"""The largest offset, term, epoch, count or time."""
LONGEST: Final = 10**9
"""The longest time in seconds, about thirty years: longer waits overflow the system's clocks."""
LONGEST_TEXT: Final = 4096
_SHOWN: Final = 60

_DESCRIPTIONS: Final[Mapping[str, str]] = {
    "Prefix": "a Prefix such as sl.kv.Prefix(b'orders.')",
    "RecordBatch": "a pyarrow.RecordBatch (log.producer() appends single records)",
    "Table": "a pyarrow.Table",
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


def _numbers(kind: Any, least: float, most: float, description: str) -> ArgumentKind:
    return ArgumentKind(
        lambda value: isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most, description
    )


def whole(least: int = 0, most: int = LARGEST_NUMBER) -> ArgumentKind:
    """Whole numbers within these bounds; no truth values."""
    first, last = ({LARGEST_NUMBER: "2**63 - 1", -LARGEST_NUMBER - 1: "-2**63"}.get(end, end) for end in (least, most))
    return _numbers((int,), least, most, f"a whole number from {first} up to {last}")


def seconds(least: float = 0, most: float = LONGEST, *, above: float | None = None) -> ArgumentKind:
    """Times in seconds within these bounds: no truth value, not NaN."""
    begin = f"from {least}" if above is None else f"above {above}"
    least = least if above is None else math.nextafter(above, math.inf)
    return _numbers((int, float), least, most, f"a number of seconds {begin} up to {most}")


def text(least: int = 0, most: float = LONGEST_TEXT, *, is_secret: bool = False) -> ArgumentKind:
    """Texts of ``least`` to ``most`` characters that can be written as UTF-8."""
    lengths = (f" of up to {most} characters" if most < math.inf else "") + (" that is not empty" if least else "")
    return ArgumentKind(
        lambda value: isinstance(value, str) and least <= len(value) <= most and is_text(value),
        f"text{lengths}",
        is_secret,
    )


def one_of(*values: object) -> ArgumentKind:
    """Exactly one of these."""
    kinds = tuple(type(value) for value in values)
    return ArgumentKind(lambda value: type(value) in kinds and value in values, _either(map(repr, values)))


def instance(kind: type, name: str = "") -> ArgumentKind:
    """Instances of a class; a text is no sequence. ``name`` is that of the type in the signature.

    >>> instance(dict).description, instance(OSError).description
    ('a dict', 'an OSError')
    """
    article = "an" if kind.__name__[0] in "AEIOaeio" else "a"
    description = _DESCRIPTIONS.get(name or kind.__name__) or f"{article} {kind.__name__}"
    other = (str, bytes) if isinstance("", kind) else ()
    return ArgumentKind(lambda value: isinstance(value, kind) and not isinstance(value, other), description)


ANY: Final = ArgumentKind(lambda _: True, "")
"""Any value: the call itself checks it, and says more than a signature can."""
Positive = Annotated[int, whole(1)]
SIGNED: Final = whole(-LARGEST_NUMBER - 1)
Signed = Annotated[int, SIGNED, msgspec.Meta(ge=-LARGEST_NUMBER - 1, le=LARGEST_NUMBER)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
"""What ``int`` is in a call, for fields that are decoded from stored JSON as well."""
Duration = Annotated[float, seconds(above=0)]
TIMEOUT: Final = seconds(-LONGEST)
Timeout = Annotated[float, TIMEOUT]
Named = Annotated[str, text(1)]
Prose = Annotated[str, text(most=math.inf)]
Secret = Annotated[str, text(is_secret=True)]

_PLAIN: Final[dict[Any, ArgumentKind]] = {
    NoneType: one_of(None),
    bool: one_of(True, False),
    int: whole(),
    float: seconds(),
    str: text(),
    bytes: ArgumentKind(lambda value: isinstance(value, bytes | bytearray | memoryview), "bytes"),
}


def kind_of(hint: Any) -> ArgumentKind | None:
    """The kind of an annotation; None for any value.

    >>> kind_of(Literal["now"] | int | None).description
    "'now', a whole number from 0 up to 2**63 - 1 or None"
    """
    kind = getattr(hint, "__supertype__", hint)  # of a NewType
    origin, parameters = get_origin(kind), get_args(kind)
    if origin is Annotated:
        stated = (extra for extra in kind.__metadata__ if isinstance(extra, ArgumentKind))
        return next(stated, None) or kind_of(parameters[0])
    if origin is Literal:
        return one_of(*parameters)
    if origin in (Union, UnionType):
        members = [kind_of(member) for member in parameters]
        return _union([member for member in members if member]) if all(members) else None
    kind = origin or kind
    is_known = isinstance(kind, type) and kind not in (object, Any) and not getattr(kind, "_is_protocol", False)
    return _PLAIN.get(kind) or (instance(kind, getattr(hint, "__name__", "")) if is_known else None)


def _union(kinds: list[ArgumentKind]) -> ArgumentKind:
    tests = tuple(kind.admits for kind in kinds)

    def admits(value: Any) -> bool:
        for test in tests:  # noqa: SIM110 - any() would take several times as long
            if test(value):
                return True
        return False

    found = _either(kind.description.replace(" or ", ", ") for kind in kinds)
    return ArgumentKind(admits, found, any(kind.is_secret for kind in kinds))


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
        if inspect.isfunction(function) and function.__annotations__.keys() - {"return"}:
            setattr(call, method, type(found)(_checked(function)) if function is not found else _checked(function))
    return call


def _checked(call: Callable[..., Any]) -> Callable[..., Any]:
    function = inspect.unwrap(call)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]

    kinds: dict[str, ArgumentKind | None] = {}

    @functools.wraps(call)
    def checked_call(*args: Any, **options: Any) -> Any:
        if not kinds:  # at the first call: annotations may refer to later definitions
            hints = inspect.get_annotations(function, eval_str=True)
            kinds.update({name: kind_of(hint) for name, hint in hints.items()})  # at once: threads see none or all
        for name, value in chain(zip(names, args, strict=False), options.items()):
            if (kind := kinds.get(name)) is not None and not kind.admits(value):
                kind.check(value, name)
        return call(*args, **options)

    return checked_call


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


def is_text(text: str, *, name_of_file: bool = False) -> bool:
    r"""Whether a text can be written as UTF-8: not if it holds a lone surrogate.

    A file name may hold the surrogates by which Python represents bytes that are not UTF-8.

    >>> is_text("größe"), is_text("\ud800"), is_text("\udcff"), is_text("\udcff", name_of_file=True)
    (True, False, False, True)
    """
    try:
        text.encode(errors="surrogateescape" if name_of_file else "strict")
    except UnicodeEncodeError:
        return False
    return True
