"""Classification of object-store failures: a pure function from obstore's error to ours.

obstore tells a few failures apart by type and the rest only by text, and not alike for every call: a refused listing
is as generic as a broken line. So the status and the store's own error code are read from the text; where there are
none, the type decides. What cannot be told is taken for a failure that may pass.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Final

from obstore import exceptions as raised


class Meaning(Enum):
    """What to make of a failure."""

    ABSENT = auto()
    """There is no such object."""
    NO_BUCKET = auto()
    """There is no such bucket or container."""
    EXISTS = auto()
    """There is one already, and there must not be."""
    CHANGED = auto()
    """It is not the version that was named."""
    RACED = auto()
    """Another request for the same object was under way; this one did nothing, and may be made again."""
    PAST_END = auto()
    """The object ends before the range."""
    NOT_LET_IN = auto()
    """The credentials are wrong, missing, or do not permit this."""
    MISDIRECTED = auto()
    """Whatever is at the endpoint cannot be talked to in this way: its scheme, certificate or region is another."""
    REFUSED = auto()
    """The store will not do this, however often it is asked."""
    PASSING = auto()
    """The line or the store failed: whether a write landed is not known, and trying again may help."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A failure's meaning, and what there is to say about it in a few words."""

    meaning: Meaning
    said: str


_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"})
_ABSENT: Final = frozenset(
    {"", "404", "NoSuchKey", "NoSuchVersion", "BlobNotFound", "PathNotFound", "ResourceNotFound", "NotFound"}
)
_NOT_LET_IN: Final = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationHeaderMalformed",
        "AuthorizationPermissionMismatch",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidAuthenticationInfo",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)
_RACED: Final = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_PASSING: Final = frozenset({"RequestTimeout", "SlowDown", "Throttling", "ServerBusy", "OperationTimedOut"})
_PASSING_STATUS: Final = frozenset({408, 425, 429})
_NEVER: Final = frozenset({501, 505})

_MISDIRECTED: Final = (
    ("BadScheme", "plain http:// is used only with the option allow_http=true"),
    ("InvalidCertificate", "its certificate is not trusted: give root_certificate, or allow_invalid_certificates=true"),
    ("InvalidMessage", "it does not speak TLS: the endpoint may have to begin with http://"),
    ("without LOCATION", "it sends us elsewhere without saying where: the region may be another"),
)
"""Words in obstore's report that no status comes with, and what they tell."""

_METADATA: Final = ("/latest/api/token", "/latest/meta-data/", "/metadata/identity/", "/computeMetadata/")
"""Where the clouds hand credentials to their own machines; asked when none were given."""

_FINAL: Final = (
    raised.NotSupportedError,
    raised.InvalidPathError,
    raised.UnknownConfigurationKeyError,
    NotImplementedError,
)


def understand(error: BaseException) -> Answer:
    """What an error of obstore means."""
    text = str(error)
    head, _, details = text.partition("\n\nDebug source:")
    status, code = _status(head), _code(text)
    if any(place in head for place in _METADATA):
        # Outside the clouds nobody is there; inside, it may be busy.
        nobody = "kind: Connect" in details or _is_final(status, code)
        story = "no credentials were given, and this machine's cloud did not hand out any"
        return Answer(Meaning.NOT_LET_IN if nobody else Meaning.PASSING, story)
    if status is None:
        for word, hint in _MISDIRECTED:
            if word in text:
                return Answer(Meaning.MISDIRECTED, hint)
    return Answer(_meaning(error, status, code, head), _words(head, text, details, code))


def _meaning(error: BaseException, status: int | None, code: str, head: str) -> Meaning:  # noqa: PLR0911 - a table
    if code in _NO_BUCKET:
        return Meaning.NO_BUCKET
    # By code too: not every server and every call has the status that fits.
    if code in _NOT_LET_IN or status in (401, 403):
        return Meaning.NOT_LET_IN
    if isinstance(error, raised.PermissionDeniedError | raised.UnauthenticatedError):
        return Meaning.NOT_LET_IN
    if code in _RACED:
        return Meaning.RACED
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or "Wanted range" in head:
        return Meaning.PAST_END
    if isinstance(error, raised.AlreadyExistsError):
        return Meaning.EXISTS
    if isinstance(error, raised.PreconditionError | raised.NotModifiedError):
        # obstore says so of a 404 too, where a version was named: then the object is gone.
        return Meaning.CHANGED
    if isinstance(error, FileNotFoundError | raised.NotFoundError):
        # Some other thing that is not there, such as the user, says nothing about the object.
        return Meaning.ABSENT if code in _ABSENT else Meaning.REFUSED
    if isinstance(error, _FINAL):
        return Meaning.REFUSED
    return Meaning.REFUSED if _is_final(status, code) else Meaning.PASSING


def _is_final(status: int | None, code: str) -> bool:
    if status is None or code in _PASSING or status in _PASSING_STATUS:
        return False
    return status < HTTPStatus.INTERNAL_SERVER_ERROR or status in _NEVER


def _status(head: str) -> int | None:
    found = re.search(r"status code: (\d{3})", head)
    return int(found[1]) if found else None


def _code(text: str) -> str:
    found = re.search(r"<Code>([^<]{1,100})</Code>", text) or re.search(r"\(code: (\w+)\)", text)
    return found[1] if found else ""


def _words(head: str, text: str, details: str, code: str) -> str:
    """The shortest true account: the status and the store's words, or the system's, or obstore's first line."""
    status = re.search(r"status code: (\d{3}[^:\n]*)", head)
    if status:
        message = re.search(r"<Message>([^<\n]{1,200})", text)
        story = [status[1].strip(), code, message[1].strip().rstrip(".") if message else ""]
        return ", ".join(part for part in story if part)
    for pattern in (r'message: "([^"]{1,200})"', r'error: "([^"]{1,200})"'):
        found = re.search(pattern, details)
        if found:
            return found[1].lower()
    if "kind: Timeout" in details:
        return "no answer came in time"
    if "IncompleteMessage" in details:
        return "the connection ended without an answer"
    return (head.strip().splitlines() or ["it gave no reason"])[0][:300].rstrip(".")
