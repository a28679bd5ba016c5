"""The errors of the package. Each message says in one sentence what happened, to what, and what to do next.

Every error of the package derives from :class:`StrandlineError`. Its class attribute ``retryable`` says whether
the same call, repeated unchanged a little later, may succeed.
"""

from __future__ import annotations

from typing import ClassVar, Self
from uuid import UUID


class StrandlineError(Exception):
    """The root of every error that this package raises."""

    retryable: ClassVar[bool] = False

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    r"""Escape control characters, and characters that cannot be encoded.

    >>> printable("a\nb \x1b[31m \ud800 é")
    'a\\nb \\x1b[31m \\ud800 é'
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class InvalidInput(StrandlineError, ValueError):
    """The caller passed an argument that can never work; nothing was changed."""


class Unsupported(InvalidInput):
    """This kind of log does not support the call, or not yet; nothing was changed."""


class UnsupportedCall(Unsupported, AttributeError):
    """This kind of log has no value format. Also an ``AttributeError``, so that ``hasattr`` is false."""


class MissingExtra(StrandlineError, ImportError):
    """An optional part is not installed; the message names the extra to install."""


# --- storage ---------------------------------------------------------------------------------------------------


class StorageError(StrandlineError):
    """A store or a disk failed."""


class NotFound(StorageError):
    """The named object does not exist."""


class AlreadyExists(StorageError):
    """A put-if-absent found the object present; nothing was changed by this call."""


class Conflict(StorageError):
    """A put-if-match found another version; nothing was changed by this call."""


class TransientStorageError(StorageError):
    """The store failed temporarily; whether a write landed is unknown."""

    retryable = True


class DiskFull(StorageError):
    """There is no room for the write; nothing was acknowledged. Make room and try again."""


class UsedAcrossFork(StorageError):
    """A store opened in one process was used in its forked child, where it would hang."""


class OutcomeUnknown(StorageError):
    """A conditional write may or may not have landed, and the object no longer remembers which."""


class Contended(StorageError):
    """A compare-and-set lost against other writers more often than the bound allows."""

    retryable = True


# --- logs ------------------------------------------------------------------------------------------------------


class NotALog(StrandlineError):
    """There is no log at this path or address."""


class WrongKind(NotALog, InvalidInput):
    """Another kind of content is at this path or address; the message names it, and what opens it."""


class UnsupportedVersion(StrandlineError):
    """The log was written by a newer version of the format than this program can read."""


class CorruptData(StrandlineError):
    """Bytes are damaged; the message names the object. Nothing was changed and no cursor moved."""


class CursorExpired(StrandlineError):
    """The cursor is below the retained offsets: the consumer has to bootstrap again."""


class Diverged(StrandlineError):
    """The cursor does not belong to this log, or is past its end."""


class NotReady(StrandlineError):
    """The answer is not known yet, which is not the same as "none". Ask again."""

    retryable = True


class Fenced(StrandlineError):
    """A newer holder has this position; this call changed nothing and its holder must stop."""


class SlotInvalid(StrandlineError):
    """The slot was invalidated and pins nothing; its consumer has to bootstrap again."""


class Gap(StrandlineError):
    """The next records do not follow: applying them would skip others. Nothing was changed.

    A range starts above its sink's cursor, or retention dropped changes before a watch received them.
    """


class WriterExpired(StrandlineError):
    """The log no longer remembers this writer, so the outcome of its earlier appends is unknown to it."""


class OutOfOrder(StrandlineError):
    """A writer's number does not follow its last listed one; nothing was changed."""


class OutOfOrderAck(StrandlineError):
    """An acknowledgement is not the next one; the message names the one that is. Nothing was changed."""


class TooManyDeadLetters(StrandlineError):
    """More batches were unreadable than the consumer may set aside; its cursor stays before the last of them."""


class ConsumerClosed(StrandlineError):
    """The consumer is closed; nothing was changed."""


class ExpectationFailed(StrandlineError):
    """A conditional append expected another end of the log; nothing was appended.

    ``end`` is where the log ended, if that is known.
    """

    end: int | None = None


class Sealed(StrandlineError):
    """The log was sealed: it takes no more records, and nothing was appended.

    Append to another log; what this one holds up to its final offset, ``end``, is complete.
    """

    end: int | None = None

    @classmethod
    def at(cls, end: int, where: str = "The log") -> Self:
        """The error of an append to a log that was sealed at this offset."""
        error = cls(
            f"{where} was sealed at offset {end} and takes no more records; nothing was appended. Append to another "
            "log."
        )
        error.end = end
        return error


class LogFailed(StorageError):
    """A write or a sync of the log failed: its durable records are kept, and nothing more is appended.

    Whether the pending appends are stored is known only when the log is opened again.
    """


class LogClosed(StrandlineError):
    """The log is closed; nothing was appended or changed."""


class CommitTimedOut(StrandlineError):
    """The append or the seal is durable on the primary, but the commit policy was not satisfied in time. It may be,
    later.
    """

    retryable = True


class Overloaded(StrandlineError):
    """Replicas are too far behind for more writes; nothing was appended. Try again when they have caught up."""

    retryable = True


class ProducerFailed(StrandlineError):
    """An earlier batch of this producer failed, so that later ones are held back.

    ``writer`` and ``number`` identify it, ``__cause__`` is the reason.
    """

    writer: UUID | None = None
    number: int | None = None


class ProducerClosed(StrandlineError):
    """The producer is closed; nothing was appended."""


class BufferFull(StrandlineError):
    """The producer's byte budget is used up and it may not block."""

    retryable = True


class SchemaRefused(InvalidInput):
    """A schema, or a change of one, does not fit what is stored; the message names the field. Nothing was changed."""


class BadRecord(StrandlineError):
    """A record cannot become a row of a table; the message names its offset and the reason."""


class NullKey(BadRecord):
    """A record without a key reached a sink that keeps one row per key; the message names its offset."""


class TransformFailed(StrandlineError):
    """A user's function raised on the records of a range; nothing of the range was applied. Correct the function."""


class JobFailed(StrandlineError):
    """A Spark job ended without its result; nothing of it was committed."""

    retryable = True


class WatchEnded(StrandlineError):
    """The watch ended before it could serve an export request; repeat the request at the next watch."""

    retryable = True
