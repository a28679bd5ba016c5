"""Spark checkpoints: discarded whenever they disagree with the cursor of the table."""

from __future__ import annotations

import json
import logging
from typing import Any, Final, cast

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from strandline.errors import InvalidInput
from strandline.model.cursor import Bounds, Cursor
from strandline.spark.planning import Remembered, agrees, decode_offset
from strandline.storage.clock import CHANCE, Chance

_LOGGER: Final = logging.getLogger(__name__)


def usable_checkpoint(
    spark: SparkSession, location: str, table: Cursor, bounds: Bounds, *, chance: Chance = CHANCE
) -> str:
    """The location, holding either nothing or a checkpoint that goes on exactly where the table stands.

    A checkpoint that is ahead of the table, of another log, or unreadable is moved to ``location.aside-…`` first.
    """
    folder = _Folder(spark, location)
    try:
        remembered = _remembered(folder)
    except (InvalidInput, ValueError, Py4JError, PySparkException) as error:
        reason = f"it cannot be read ({str(error).splitlines()[0][:200]})"
    else:
        if remembered is None or agrees(remembered, table, bounds):
            return location
        reason = f"it stands at {remembered.upto} and the table at {table}"
    aside = f"{location.rstrip('/')}.aside-{chance.uuid()}"
    folder.move(aside)
    _LOGGER.warning(
        "The checkpoint %s was set aside as %s: %s. The table's own cursor is what counts.", location, aside, reason
    )
    return location


def _remembered(folder: _Folder) -> Remembered | None:
    offsets, commits = folder.numbers("offsets"), folder.numbers("commits")
    if not offsets:
        # Without the offsets, Spark numbers batches anew and trips over commits that are still there.
        if commits:
            raise InvalidInput("it holds commits and no offsets")
        return None
    last = max(offsets)
    before = _end_of(folder, last - 1) if last - 1 in offsets else None
    if before is None and last > 0:
        raise InvalidInput(f"the offsets of batch {last - 1} are missing")
    return Remembered(before, _end_of(folder, last), last in commits)


def _end_of(folder: _Folder, number: int) -> Cursor:
    version, _, *sources = folder.text(f"offsets/{number}").splitlines()
    if version != "v1" or len(sources) != 1:
        raise InvalidInput(f"the offsets of batch {number} are not of one log")
    return decode_offset(json.loads(sources[0]))


class _Folder:
    """A folder on whatever file system Spark keeps its checkpoints on."""

    def __init__(self, spark: SparkSession, location: str) -> None:
        session, self._jvm = cast("Any", spark), cast("Any", spark._jvm)  # noqa: SLF001 - the way to Hadoop's files
        self._path: Any = self._jvm.org.apache.hadoop.fs.Path(location)
        self._files: Any = self._path.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001

    def _child(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._path, name)

    def numbers(self, name: str) -> set[int]:
        folder = self._child(name)
        if not self._files.exists(folder):
            return set()
        names = [str(status.getPath().getName()) for status in self._files.listStatus(folder)]
        return {int(name) for name in names if name.isdecimal()}

    def text(self, name: str) -> str:
        stream = self._files.open(self._child(name))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream)).decode()
        finally:
            stream.close()

    def move(self, target: str) -> None:
        if not self._files.rename(self._path, self._jvm.org.apache.hadoop.fs.Path(target)):
            raise InvalidInput(f"The stale checkpoint {self._path} could not be moved to {target}: remove it.")
