"""Options of a write: parsing of Spark's strings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from strandline.errors import InvalidInput
from strandline.model.arguments import LARGEST_NUMBER, shown
from strandline.spark.options import (
    NODE_OPTIONS,
    NodeAccess,
    count_of,
    given_options,
    node_access_of,
    shared_address,
    truth_of,
    word_of,
)
from strandline.spark.storage_options import storage_options

_KNOWN: Final = (
    "path",
    "job",
    "number",
    "writer",
    "expectedOffset",
    "repeated",
    "compression",
    "create",
    "outbox",
    *NODE_OPTIONS.values(),
    "checkpointLocation",
    "queryName",
)
_LONGEST_NAME: Final = 1000


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Where a job or a stream writes, and under which name.

    ``job``: a batch job of this name is in the log once; with ``number`` it is one of a series, whose numbers grow.
    ``writer``: the name of a stream; None: its query's id. ``expect``: the offset at which the log has to end.
    ``accept``: a job or micro-batch that the log has already is not compared with it. ``outbox``: the address of an
    object log through which rows pass into a node or a write-ahead log; ``node``: how the driver calls the node, with
    its token in a file: Spark sends these options to executors, too.
    """

    url: str
    kind: Literal["job", "stream"]
    job: str | None = None
    number: int | None = None
    writer: str | None = None
    expect: int | None = None
    accept: bool = False
    compression: str = "lz4"
    create: bool = False
    outbox: str | None = None
    storage: dict[str, str] = field(default_factory=dict, repr=False)
    node: NodeAccess = field(default_factory=NodeAccess)


def parse_write_options(options: Mapping[str, str], kind: Literal["job", "stream"]) -> WriteOptions:
    """Parse the options of a write; one sentence about the first invalid one.

    >>> parse_write_options({"path": "s3://bucket/orders", "job": "nightly", "number": "7"}, "job").number
    7
    >>> parse_write_options({"path": "s3://bucket/orders", "jobs": "nightly"}, "job")
    Traceback (most recent call last):
    ...
    strandline.errors.InvalidInput: The sink has no option 'jobs'; did you mean 'job'?
    """
    given = given_options(options, _KNOWN, "sink")
    url = shared_address(given)
    unfit = ("writer",) if kind == "job" else ("job", "number", "expectedOffset")
    for name in unfit:
        if name.lower() in given:
            other = "streams" if kind == "job" else "batch jobs"
            raise InvalidInput(
                f"{name} is an option of {other}, and this is a {'batch job' if kind == 'job' else kind}."
            )
    job, number = _name(given, "job"), count_of(given, "number", 0)
    if number == LARGEST_NUMBER:
        raise InvalidInput(f"number is at most {LARGEST_NUMBER - 1}: the log remembers the one behind it.")
    if number is not None and job is None:
        raise InvalidInput("number is the number of a job in its series: name the series with the option job.")
    return WriteOptions(
        url=url,
        kind=kind,
        job=job,
        number=number,
        writer=_name(given, "writer"),
        expect=count_of(given, "expectedOffset", 0),
        accept=word_of(given, "repeated", "check", "accept") == "accept",
        compression=given.get("compression", "lz4"),
        create=truth_of(given, "create", default=False),
        outbox=None if "outbox" not in given else shared_address({"path": given["outbox"]}),
        node=node_access_of(given, url),
        storage=storage_options(given),
    )


def _name(given: Mapping[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and not (text.strip() and len(text) <= _LONGEST_NAME):
        raise InvalidInput(f"{name} is a name of 1 to {_LONGEST_NAME} characters, not {shown(text)}.")
    return text
