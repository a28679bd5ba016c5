"""Batches and errors on their way to and from Spark, without a session."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from strandline.errors import CorruptData, Fenced, InvalidInput, JobFailed, TransformFailed, TransientStorageError
from strandline.model.records import READ_SCHEMA
from strandline.spark.datasource.shaping import SPARK_SCHEMA, check_schema, shaped
from strandline.spark.failures import UserFailures, retried, unwrapped
from strandline.storage.env import Env
from strandline.storage.retry import Backoff
from strandline.testing.clock import ManualClock


def batch(*values: bytes) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array(values, pa.binary())})


SHAPE = batch(b"").schema


def test_the_whole_log_has_exactly_the_declared_spark_schema():
    assert check_schema(SPARK_SCHEMA).equals(READ_SCHEMA)


def test_a_narrower_schema_keeps_the_order_that_was_asked():
    assert check_schema(StructType([SPARK_SCHEMA["value"], SPARK_SCHEMA["offset"]])).names == ["value", "offset"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ([StructField("colour", StringType())], "no column 'colour'; its columns are offset, timestamp"),
        ([StructField("value", StringType())], "'value' of a log is BINARY, not STRING"),
        ([StructField("offset", IntegerType())], "'offset' of a log is BIGINT, not INT"),
        ([SPARK_SCHEMA["key"], SPARK_SCHEMA["key"]], "twice"),
        ([], "empty"),
    ],
)
def test_a_wrong_schema_is_one_clear_sentence(fields, sentence):
    with pytest.raises(InvalidInput, match=sentence):
        check_schema(StructType(fields))


@given(
    st.lists(st.lists(st.binary(max_size=40), max_size=30), max_size=12),
    st.integers(1, 20),
    st.integers(1, 200),
)
def test_shaping_keeps_rows_and_order_within_the_limits(groups, rows, size):
    shape = list(shaped([batch(*group) for group in groups], SHAPE, rows=rows, size=size))
    assert [value for piece in shape for value in piece.column(0).to_pylist()] == [v for group in groups for v in group]
    assert all(1 <= piece.num_rows <= rows for piece in shape)
    assert all(piece.nbytes <= size + 4 or piece.num_rows == 1 for piece in shape)


def test_small_batches_are_joined_and_one_huge_value_is_alone():
    shape = list(shaped([batch(b"a"), batch(b"b", b"x" * 1000, b"c"), batch(b"d")], SHAPE, rows=100, size=100))
    assert [piece.column(0).to_pylist() for piece in shape] == [[b"a", b"b"], [b"x" * 1000], [b"c", b"d"]]


def test_our_error_is_found_in_the_text_of_sparks():
    text = (
        "[FOREACH_BATCH] Traceback...\nstrandline.errors.NotFound: There is nothing at x.\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "strandline.errors.CorruptData: s3://b/x is damaged. Restore it.\n\tat org.apache.spark"
    )
    error = unwrapped(RuntimeError(text))
    assert isinstance(error, CorruptData)
    assert str(error) == "s3://b/x is damaged. Restore it."


def test_other_errors_stay_what_they_are():
    error = RuntimeError("strandline.errors.NoSuchName: x")
    assert unwrapped(error) is error


class Failing:
    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def __call__(self) -> str:
        self.left -= 1
        if self.left >= 0:
            raise self.error
        return "done"


def test_transient_errors_are_retried_a_bounded_number_of_times():
    backoff = Backoff(attempts=3, base=1.0)
    assert retried(Failing(2, TransientStorageError("x")), backoff=backoff, env=Env(clock=ManualClock())) == "done"
    with pytest.raises(TransientStorageError):
        retried(Failing(3, TransientStorageError("x")), backoff=backoff, env=Env(clock=ManualClock()))


def test_permanent_errors_are_not_retried():
    failing = Failing(1, Fenced("x"))
    with pytest.raises(Fenced):
        retried(failing, env=Env(clock=ManualClock()))
    assert failing.left == 0


def job_failed(frames: str, last: str) -> tuple[JobFailed, RuntimeError]:
    raised = f"Traceback (most recent call last):\n{frames}\n{last}\n"
    return JobFailed("x"), RuntimeError(f"An exception was thrown from the Python worker.\n{raised}\tat org.apache")


def test_only_the_same_failure_of_the_users_own_code_is_blamed_on_it():
    users = '  File "/home/ann/job.py", line 3, in parse\n    int(x)'
    ours = '  File "/venv/strandline/tables/files/part.py", line 3, in write\n    put(x)'
    failures = UserFailures()
    for frames, last, is_blamed in [
        (users, "ValueError: a", False),
        (users, "ValueError: a", False),
        (users, "ValueError: b", False),
        (ours, "OSError: full", False),
        *[(ours, "OSError: full", False)] * 4,
        *[(users, "ValueError: a", False)] * 2,
        (users, "ValueError: a", True),
    ]:
        found = failures.judged(*job_failed(frames, last))
        assert isinstance(found, TransformFailed) == is_blamed
    lost = RuntimeError("Job aborted: ExecutorLostFailure (executor 1 exited): Python worker exited unexpectedly")
    for _ in range(5):
        assert isinstance(failures.judged(JobFailed("x"), lost), JobFailed)
