"""Two versions of the package, on driver and executors: what one sends, the other refuses in one sentence."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strandline.errors import UnsupportedVersion
from strandline.log.topic.logs import open_object_topic
from strandline.spark import StrandlineDataSource
from strandline.spark.datasource.shaping import SPARK_SCHEMA
from strandline.spark.task_payload import packed, unpacked
from tests.spark.helpers import new_log

SENT: dict[str, Callable[[StrandlineDataSource], Any]] = {
    "a batch read": lambda source: source.reader(SPARK_SCHEMA),
    "a stream": lambda source: source.streamReader(SPARK_SCHEMA),
    "a write": lambda source: source.writer(SPARK_SCHEMA, overwrite=False),
    "a stream's write": lambda source: source.streamWriter(SPARK_SCHEMA, overwrite=False),
}


@pytest.mark.parametrize("kind", ["reader", "streamReader"])
def test_readers_of_topics_of_another_version_are_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_object_topic(f"file://{tmp_path}/topic", 2, create=True)
    sent = getattr(StrandlineDataSource({"path": f"file://{tmp_path}/topic", "logFormat": "topic"}), kind)(SPARK_SCHEMA)
    with monkeypatch.context() as other:
        other.setattr("strandline.spark.task_payload.version", lambda _: "0.0.1")
        payload = pickle.dumps(sent)
    with pytest.raises(UnsupportedVersion):
        pickle.loads(payload)


@pytest.mark.parametrize("what", SENT)
def test_readers_and_writers_of_another_version_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = SENT[what](StrandlineDataSource({"path": new_log(tmp_path).url}))
    assert type(pickle.loads(pickle.dumps(sent))) is type(sent)
    with monkeypatch.context() as other:
        other.setattr("strandline.spark.task_payload.version", lambda _: "0.0.1")
        payload = pickle.dumps(sent)
    with pytest.raises(UnsupportedVersion, match=r"The driver has version 0\.0\.1 of strandline and an executor has"):
        pickle.loads(payload)


class _Unknown:
    """Stands for a class that the other version lacks: it cannot be unpickled."""

    def __reduce__(self) -> Any:
        return pickle.loads, (b"nothing that can be unpickled",)


def test_versions_are_compared_before_anything_else_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("strandline.spark.task_payload.version", lambda _: "0.0.1")
        payload = packed(_Unknown(), "A task")
    with pytest.raises(UnsupportedVersion):
        unpacked(payload)
