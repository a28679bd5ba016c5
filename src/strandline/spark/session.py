"""A local Spark session that starts quickly and quietly."""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from pathlib import PurePath
from typing import Final

from pyspark import __version__ as pyspark_version
from pyspark.errors import PySparkRuntimeError
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

from strandline.errors import MissingExtra, StorageError
from strandline.storage.disk import Disk
from strandline.storage.env import SYSTEM, Env

_ARCHIVE_MAGIC: Final = (b"\xf0\x0b\xab\xa2", b"\xa2\xab\x0b\xf0", b"\xf0\x0b\xab\xa8", b"\xa8\xab\x0b\xf0")
_QUICK: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_LOGGING: Final = str(PurePath(__file__).with_name("log4j2.properties"))
_QUIET: Final = "" if " " in _LOGGING else f"-Dlog4j2.configurationFile=file:{_LOGGING}"


def local_session(
    app_name: str = "strandline",
    *,
    cores: int = 2,
    memory: str = "2g",
    short_lived: bool = False,
    env: Env = SYSTEM,
    **conf: str,
) -> SparkSession:
    """A session that runs in this machine's memory and listens only on the loopback address.

    ``short_lived`` trades peak speed for a quicker start: for tests and demos. The JVM's loaded classes are stored in
    the user's cache folder, which halves the start-up of later sessions; if that folder cannot be written, sessions
    just start more slowly. Further settings are Spark's own, with their dots:
    ``**{"spark.sql.shuffle.partitions": "8"}``; they take precedence.

    ``MissingExtra`` if there is no Java. An active session is returned unchanged.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    java = find_java()
    # Workers are started by name; by default they would run the system's Python, without this package.
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    java_options = [_QUIET, _QUICK if short_lived else "", _archive_options(java, env.disk)]
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": memory,
        "spark.driver.maxResultSize": "0",
        "spark.driver.extraJavaOptions": " ".join(option for option in java_options if option),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": str(cores),
        # 25 % more throughput between the JVM and its Python workers than by TCP in steps of 64 KiB.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.buffer.size": str(1 << 20),
        "spark.sql.session.timeZone": "UTC",
        # A second query with the same checkpoint is refused; by default it would silently stop the first one.
        "spark.sql.streaming.stopActiveRunOnRestart": "false",
        "spark.sql.streaming.forceDeleteTempCheckpointLocation": "true",
        **conf,
    }
    builder = SparkSession.builder.master(f"local[{cores}]").appName(app_name)
    for name, value in settings.items():
        if value:
            builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise MissingExtra(f"Java could not start Spark: {java} must be Java 17 or 21.") from error


def find_java() -> str:
    """The Java that Spark would start: in ``JAVA_HOME`` if set, else on the path. ``MissingExtra`` if none."""
    home = os.environ.get("JAVA_HOME")
    folders = [f"{home}/bin"] if home else os.environ.get("PATH", "").split(os.pathsep)
    for folder in folders:
        java = f"{folder}/java"
        if os.access(java, os.X_OK):
            return os.path.realpath(java)
    there, advice = (f"in JAVA_HOME ({home})", "correct that, or ") if home else ("on the PATH", "")
    raise MissingExtra(
        f"Spark needs Java 17 or 21 and there is none {there}: {advice}install it (Debian: openjdk-17-jre-headless)."
    )


def _archive_options(java: str, disk: Disk) -> str:
    """JVM options that use the archive of loaded classes, or create one when the JVM exits.

    Safe under concurrency and crashes: the JVM writes the archive's head last and unlinks an older file first, so a
    reader sees a whole archive or none; it ignores an archive of another Java or class path. Such
    an archive would never be replaced: so each installation of Spark has its own, which is created again after a
    reinstallation.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or f"{os.environ.get('HOME', '')}/.cache"
    name = "".join(letter if letter.isalnum() else "-" for letter in java.strip("/"))
    folder, jars = f"{cache}/strandline", f"{_find_spark_home()}/jars"
    if " " in folder:
        return ""  # Spark splits the options at spaces
    quiet = "-Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
    try:
        disk.make_folders(folder)
        installation = f"spark-{pyspark_version}-{name}-{_short_hash(jars)}"
        current = f"{installation}-{_short_hash(disk.scan(jars))}.jsa"
        file = f"{folder}/{current}"
        with contextlib.suppress(StorageError):
            if disk.read(file, 0, 4) in _ARCHIVE_MAGIC:
                return f"{quiet} -XX:SharedArchiveFile={file}"
        for row in disk.scan(folder):
            if row.name.startswith(installation) and row.name != current:
                disk.remove(f"{folder}/{row.name}")
    except StorageError:
        return ""
    return f"{quiet} -XX:ArchiveClassesAtExit={file}"


def _short_hash(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"
