"""The settings of a server: one frozen structure for each section of its file."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from strandline.serve.config.values import Bytes, Listen, Options, PageOrigin, Policy, Seconds, Start


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A section of the file; a setting that it does not have is refused."""


class ProcessSection(Section, frozen=True, kw_only=True):
    """The process itself."""

    folder: str = ".strandline"
    """Its own folder: the lock that keeps a second process out, and the settings that are in force."""
    drain: Seconds = Seconds(30)
    """After SIGTERM: how long its parts have to finish what they do."""


class HttpSection(Section, frozen=True, kw_only=True):
    """The port for HTTP."""

    listen: Listen = Listen("127.0.0.1:7700")
    """Where to listen; other machines only with TLS and tokens."""
    origins: tuple[PageOrigin, ...] = ()
    """Origins of pages that may call it from a browser; any (``*``) only with tokens."""


class FlightSection(Section, frozen=True, kw_only=True):
    """The port for Arrow Flight, of a node."""

    listen: Listen = Listen("127.0.0.1:7450")
    """Where the node listens; each of several nodes has its own ``listen``."""


class SecuritySection(Section, frozen=True, kw_only=True):
    """Who may call, over HTTP and Flight, and how this process authenticates itself to nodes."""

    cert: str | None = None
    """The certificate, for TLS (PEM)."""
    key: str | None = None
    """Its key (PEM)."""
    client_ca: str | None = None
    """Admit only callers with a certificate of this authority (PEM)."""
    tokens: str | None = None
    """The file with the callers' tokens: lines 'name roles token'."""
    ca: str | None = None
    """The authority that signs the other nodes' certificates (PEM)."""
    token: str | None = None
    """The file with the token that this process shows to nodes."""


class ColdSection(Section, frozen=True, kw_only=True):
    """The cold tier of a log, and the rounds that copy into it."""

    store: str | None = None
    """Where segments are put; by default ``cold`` beside the log."""
    events: str | None = None
    """Where their events are; by default ``events`` in that store."""
    every: Seconds = Seconds(10)
    """How long to wait between two rounds."""
    target: Bytes = Bytes(256 << 20)
    """About how large a segment is, at most 1 GiB."""
    linger: Seconds = Seconds(3600)
    """How long records wait at most for a segment to be filled."""
    retention: Policy = Policy("forever")
    """What the cold tier keeps."""
    compact: bool = False
    """Also merge small segments, once an hour."""


class NodeSection(Section, frozen=True, kw_only=True):
    """A node of a replicated log; the address of the log is the node's folder."""

    name: str
    """Unique among the log's nodes; it never changes."""
    listen: Listen | None = None
    """Where it listens; by default as ``[flight]`` says."""
    url: str | None = None
    """Where the other nodes reach it, if not where it listens."""
    lead: bool = False
    """Without a lease: be the primary."""
    upstream: str | None = None
    """Without a lease: the primary to follow."""
    lease: str | None = None
    """The folder or bucket of the lease that decides which node leads."""
    lease_seconds: Seconds = Seconds(15)
    """How long the lease outlives its holder."""
    automatic: bool = False
    """Take over when the primary is gone."""
    policy: str = "local"
    """When an append counts."""
    nodes: dict[str, str] = {}
    """The other nodes with their addresses."""
    region: str | None = None
    """The region it runs in."""


class LogSection(Section, frozen=True, kw_only=True):
    """A log that this process opens and looks after."""

    address: str
    """Its address; of a node its folder."""
    create: bool = False
    """Make it if there is none."""
    content_type: str | None = None
    """The media type of its values, which a new log records for good, and another one has to have."""
    options: Options = {}
    """Settings of its object store, by obstore's names."""
    retention: Policy | None = None
    """What it keeps; without it what is stored with the log."""
    slot_lag: Bytes | None = None
    """A slot further behind is invalidated."""
    slot_idle: Seconds | None = None
    """A slot whose holder was not seen for longer is invalidated."""
    trim: Seconds | None = None
    """How long to wait between two trims; without it this process does not trim the log."""
    grace: Seconds = Seconds(600)
    """How long trimmed objects are kept, for readers that had planned to read them."""
    cold: ColdSection | None = None
    node: NodeSection | None = None


class StreamsSection(Section, frozen=True, kw_only=True):
    """Logs that clients create over HTTP."""

    root: str
    """The address under which they are."""
    options: Options = {}
    """Settings of the object store, by obstore's names."""


class IngestSection(Section, frozen=True, kw_only=True):
    """Records of another system that are appended to a log."""

    source: str
    """A log of this file, or an address as ``strandline ingest`` takes it."""
    target: str
    """A log of this file, or an address."""
    slot: str | None = None
    """The slot that pins the source between two runs."""
    start: Start = Start("beginning")
    """Where the first ingest of the source begins."""
    skip_trimmed: bool = False
    """Continue without records that the source deleted before they were ingested."""
    config: Options = {}
    """Settings of the client of Kafka or NATS."""


class TableSection(Section, frozen=True, kw_only=True):
    """A table that is kept in step with a log."""

    log: str
    """A log of this file, or an address."""
    sink: str
    """The address of the table; with ``by`` of all tables, with ``{name}`` where the name goes."""
    by: str | None = None
    """Make a table for each name among the records: a field such as source.table, header:NAME, or key:SEPARATOR."""
    unrouted: str | None = None
    """With ``by``: a table for the records without a name, as bytes; or skip."""
    without: tuple[str, ...] = ()
    """With ``by``: names that have no table."""
    names: str | None = None
    """With ``by``: where the names are remembered; without it beside the tables."""
    follow: bool = True
    """Whether this process follows; if not, another one does, such as Spark, and this one watches how far it is."""
    mode: Literal["latest", "marked", "append", "history"] | None = None
    """What a new table keeps; without it the latest row of each key, or as the table records it."""
    schema: str | None = None
    """Decode JSON values by the JSON Schema or Avro schema in this file, which may have ``{name}``; without it as the
    log names its format."""
    envelope: Literal["debezium", "before-after"] | None = None
    """The values are change events around rows of the ``schema``."""
    raw: bool = False
    """Keys and values as bytes, also of a log that names a format."""
    key: tuple[str, ...] = ()
    """The columns that identify a row."""
    tombstones: Literal["key", "json", "dead-letters"] | None = None
    """How a delete without a value names its row."""
    partition_by: tuple[str, ...] = ()
    """Columns that divide a new Delta or Iceberg table."""
    cluster_by: tuple[str, ...] = ()
    """Columns by which the rows of its files are ordered."""
    upkeep: Seconds | None = None
    """Join small files, and remove versions that were replaced longer ago."""
    dead_letters: str | None = None
    """A second table, for records that cannot become rows; in a SQL database 'yes'."""
    slot: str | None = None
    """The slot that pins what is still to be applied."""
    start: Start = Start("beginning")
    """Where a new table begins."""
    options: Options = {}
    """Settings of the table's object store."""


class SnapshotSection(Section, frozen=True, kw_only=True):
    """Snapshots of a log's newest values that are built and published again and again."""

    log: str
    """A log of this file, or an address."""
    publish: str
    """Where each is published, for stores that bootstrap."""
    every: Seconds = Seconds(86400)
    """How long to wait between two snapshots."""
    kind: Literal["append-log", "rocksdb"] = "append-log"
    """The kind of store that imports them."""


class Settings(Section, frozen=True, kw_only=True):
    """A whole file."""

    process: ProcessSection = ProcessSection()
    http: HttpSection = HttpSection()
    flight: FlightSection = FlightSection()
    security: SecuritySection = SecuritySection()
    logs: dict[str, LogSection] = {}
    streams: StreamsSection | None = None
    ingest: dict[str, IngestSection] = {}
    tables: dict[str, TableSection] = {}
    snapshots: dict[str, SnapshotSection] = {}


OF_MANY: Final[dict[str, type[Section]]] = {
    "logs": LogSection,
    "ingest": IngestSection,
    "tables": TableSection,
    "snapshots": SnapshotSection,
}
"""The sections that are tables of named parts."""
