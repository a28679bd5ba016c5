"""Errors of ``obstore``, classified: by class, HTTP status, the store's own code, and text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Final

from obstore import exceptions as raised

from strandline.errors import (
    AlreadyExists,
    Conflict,
    InvalidInput,
    NotFound,
    StorageError,
    StrandlineError,
    TransientStorageError,
)


class Raced(TransientStorageError):
    """The store did nothing, since another request was in progress."""


class Meaning(Enum):
    """Kind of a failure: the error for it, and its sentence."""

    ABSENT = NotFound, "There is no object {where}."
    NO_BUCKET = StorageError, "There is no bucket for {where} ({said}): create it, or correct the address."
    EXISTS = AlreadyExists, "{where} exists already."
    CHANGED = Conflict, "{where} was changed by another writer; read it again."
    RACED = Raced, "Another request for {where} was under way; nothing was done. Try again."
    PAST_END = InvalidInput, "{where} ends before the requested bytes."
    DENIED = StorageError, "The store denied access to {where} ({said}): check the credentials and what they permit."
    MISDIRECTED = StorageError, "The store at {url} cannot be reached: {said}. Check the endpoint."
    REFUSED = StorageError, "The store refused {where}: {said}. Retrying does not help."
    TRANSIENT = TransientStorageError, "The store failed at {where}: {said}. Retrying may help."
    """The outcome of a write is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The kind of a failure, and a short description."""

    meaning: Meaning
    said: str

    def error(self, url: str, path: str) -> StrandlineError:
        """The error for an object of the store at this address."""
        kind, sentence = self.meaning.value
        error: StrandlineError = kind(sentence.format(where=f"{url}/{path}", url=url, said=self.said))
        return error


_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled"})

_ABSENT: Final = frozenset(
    {"", "404", "NoSuchKey", "NoSuchVersion", "BlobNotFound", "PathNotFound", "ResourceNotFound", "NotFound"}
)

_DENIED: Final = frozenset(
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

_TRANSIENT: Final = frozenset({"RequestTimeout", "SlowDown", "Throttling", "ServerBusy", "OperationTimedOut"})

_TRANSIENT_STATUS: Final = frozenset({408, 425, 429})

_UNSUPPORTED_STATUS: Final = frozenset({501, 505})

_MISDIRECTED: Final = (
    ("BadScheme", "plain http:// is used only with the option allow_http=true"),
    ("InvalidCertificate", "its certificate is not trusted: give root_certificate, or allow_invalid_certificates=true"),
    ("InvalidMessage", "it does not speak TLS: the endpoint may have to begin with http://"),
    ("without LOCATION", "it redirects without a location: the region may be wrong"),
)
"""Words in obstore's errors without a status, and what they mean."""

_METADATA: Final = ("/latest/api/token", "/latest/meta-data/", "/metadata/identity/", "/computeMetadata/")
"""Paths of the clouds' metadata services, which are queried if no credentials are given."""

_FINAL: Final = (
    raised.NotSupportedError,
    raised.InvalidPathError,
    raised.UnknownConfigurationKeyError,
    NotImplementedError,
)


def classify(error: BaseException) -> Answer:
    """Classify an error of obstore."""
    text = str(error)
    head, _, details = text.partition("\n\nDebug source:")
    status, code = _status(head), _code(text)
    if any(place in head for place in _METADATA):
        # Outside the clouds there is no such service; inside, it may be busy.
        is_denied = "kind: Connect" in details or _is_final(status, code)
        reason = "no credentials were given, and this machine's cloud provided none"
        return Answer(Meaning.DENIED if is_denied else Meaning.TRANSIENT, reason)
    if status is None:
        for word, hint in _MISDIRECTED:
            if word in text:
                return Answer(Meaning.MISDIRECTED, hint)
    return Answer(_meaning(error, status, code, head), _description(head, text, details, code))


def _meaning(error: BaseException, status: int | None, code: str, head: str) -> Meaning:  # noqa: PLR0911 - a table
    if code in _NO_BUCKET:
        return Meaning.NO_BUCKET
    # By code, too: not every server and call has the right status.
    is_denied = isinstance(error, raised.PermissionDeniedError | raised.UnauthenticatedError)
    if is_denied or code in _DENIED or status in (401, 403):
        return Meaning.DENIED
    if code in _RACED:
        return Meaning.RACED
    if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE or "Wanted range" in head:
        return Meaning.PAST_END
    if isinstance(error, raised.AlreadyExistsError):
        return Meaning.EXISTS
    if isinstance(error, raised.PreconditionError | raised.NotModifiedError):
        # obstore also raises this for a 404 of a conditional write: then the object is gone.
        return Meaning.CHANGED
    if isinstance(error, FileNotFoundError | raised.NotFoundError):
        # Something else is missing, such as the user: that says nothing about the object.
        return Meaning.ABSENT if code in _ABSENT else Meaning.REFUSED
    if isinstance(error, _FINAL):
        return Meaning.REFUSED
    return Meaning.REFUSED if _is_final(status, code) else Meaning.TRANSIENT


def _is_final(status: int | None, code: str) -> bool:
    if status is None or code in _TRANSIENT or status in _TRANSIENT_STATUS:
        return False
    return status < HTTPStatus.INTERNAL_SERVER_ERROR or status in _UNSUPPORTED_STATUS


def _status(head: str) -> int | None:
    found = re.search(r"status code: (\d{3})", head)
    return int(found[1]) if found else None


def _code(text: str) -> str:
    found = re.search(r"<Code>([^<]{1,100})</Code>", text) or re.search(r"\(code: (\w+)\)", text)
    return found[1] if found else ""


def _description(head: str, text: str, details: str, code: str) -> str:
    """A short description: status and the store's message, or the system's message, or obstore's first line."""
    status = re.search(r"status code: (\d{3}[^:\n]*)", head)
    if status:
        message = re.search(r"<Message>([^<\n]{1,200})", text)
        reason = [status[1].strip(), code, message[1].strip().rstrip(".") if message else ""]
        return ", ".join(part for part in reason if part)
    for pattern in (r'message: "([^"]{1,200})"', r'error: "([^"]{1,200})"'):
        found = re.search(pattern, details)
        if found:
            return found[1].lower()
    if "kind: Timeout" in details:
        return "no answer came in time"
    if "IncompleteMessage" in details:
        return "the connection ended without an answer"
    return (head.strip().splitlines() or ["it gave no reason"])[0][:300].rstrip(".")
