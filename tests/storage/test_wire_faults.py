"""Faults over the wire: what a real client makes of answers that are lost, late, refused or wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from strandline.errors import (
    AlreadyExists,
    Conflict,
    Contended,
    InvalidInput,
    NotFound,
    OutcomeUnknown,
    StorageError,
    StrandlineError,
    TransientStorageError,
)
from strandline.model.stamp import OpId
from strandline.storage.cell import StoreCell
from strandline.storage.env import Env
from strandline.storage.objects.remote import ObstoreStore
from strandline.storage.objects.store import ABSENT, Match, ObjectStore, Version
from strandline.storage.retry import RetryingStore
from strandline.testing.clock import ManualClock, SeededChance
from strandline.testing.faulty import Faults
from strandline.testing.stores import ObjectStoreContract, content, paths, together
from tests.matrix_cases import some
from tests.proxy import Fault, FaultyProxy, Weather, answer, hang, reset
from tests.servers import BUCKET, S3Server, Server, fresh_prefix
from tests.storage.cell_contract import JsonCodec, Operations, increment
from tests.storage.cell_histories import play

LOST: dict[str, Fault] = {
    "reset": reset(landed=True),
    "500": answer(500, "InternalError", landed=True),
    "502": answer(502, "BadGateway", landed=True),
    "503": answer(503, "SlowDown", landed=True),
}
"""Ways in which a server does what it was asked, and the client does not hear of it."""

NEVER_CAME: dict[str, Fault] = {
    "reset": reset(),
    "500": answer(500, "InternalError"),
    "503": answer(503, "SlowDown"),
    "408": answer(408, "RequestTimeout"),
    "400 timeout": answer(400, "RequestTimeout"),
    "429": answer(429, "TooManyRequests"),
}
"""Ways in which nothing is done, and trying again may help."""

STORM = {
    reset(): 0.04,
    reset(landed=True): 0.08,
    answer(503, "SlowDown"): 0.04,
    answer(500, "InternalError", landed=True): 0.06,
    answer(409, "ConditionalRequestConflict"): 0.04,
}


@pytest.fixture(scope="module", params=["s3", pytest.param("azure", marks=pytest.mark.matrix)])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture
def line(server: Server) -> Iterator[FaultyProxy]:
    with FaultyProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
def url(server: Server) -> str:
    return server.url(BUCKET, fresh_prefix())


@pytest.fixture
def good(server: Server, url: str) -> ObstoreStore:
    """Another client's store over a connection without faults."""
    return ObstoreStore(url, server.options)


@pytest.fixture
def store(server: Server, url: str, line: FaultyProxy) -> ObstoreStore:
    """The store under test, without retries, over a connection that the test may cut."""
    return ObstoreStore(url, server.options_through(line.endpoint))


@pytest.fixture
def patient(store: ObstoreStore) -> RetryingStore:
    """The store as ``open_store`` opens it, with a clock of the test."""
    return RetryingStore(store, env=Env(clock=ManualClock(), chance=SeededChance(1)))


def cell_in(store: ObjectStore) -> StoreCell[int]:
    return StoreCell(store, "cell", JsonCodec[int](), env=Env(clock=ManualClock(), chance=SeededChance(2)))


OPERATIONS: dict[str, Callable[[ObjectStore, Version], object]] = {
    "get": lambda store, _: store.get("a"),
    "get_range": lambda store, _: store.get_range("a", 0, 1),
    "put": lambda store, _: store.put("a", b"2"),
    "create": lambda store, _: store.put_if("new", b"2", ABSENT),
    "update": lambda store, version: store.put_if("a", b"2", Match(version)),
    "list": lambda store, _: list(store.list("")),
    "delete": lambda store, _: store.delete("a"),
}


class TestWhatAnAnswerMeans:
    @pytest.fixture
    def ask(
        self, store: ObstoreStore, good: ObstoreStore, line: FaultyProxy
    ) -> Callable[[str, Fault], type[Exception]]:
        version = good.put_if("a", b"1", ABSENT)

        def ask(operation: str, fault: Fault) -> type[Exception]:
            line.fail_next(fault)
            with pytest.raises(StrandlineError) as caught:
                OPERATIONS[operation](store, version)
            # Each says what it was about, and whether it may be worth another try.
            assert store.url in str(caught.value)
            assert caught.value.retryable == isinstance(caught.value, TransientStorageError)
            return next(kind for kind in type(caught.value).__mro__ if kind.__module__ == "strandline.errors")

        return ask

    @pytest.mark.parametrize("operation", some(OPERATIONS, 3))
    @pytest.mark.parametrize("fault", [*NEVER_CAME.values(), *LOST.values()], ids=str)
    def test_a_failure_that_may_pass_is_transient_whatever_was_asked(
        self, ask: Callable[[str, Fault], type[Exception]], operation: str, fault: Fault
    ) -> None:
        assert ask(operation, fault) is TransientStorageError

    @pytest.mark.parametrize("operation", some(OPERATIONS, 3))
    @pytest.mark.parametrize(
        ("status", "code"),
        [(401, "Unauthorized"), (403, "AccessDenied"), (403, "SignatureDoesNotMatch"), (400, "ExpiredToken")],
    )
    def test_not_being_let_in_is_final_whatever_was_asked(
        self, ask: Callable[[str, Fault], type[Exception]], operation: str, status: int, code: str
    ) -> None:
        assert ask(operation, answer(status, code)) is StorageError

    @pytest.mark.parametrize("operation", some(OPERATIONS, 3))
    @pytest.mark.parametrize(("status", "code"), [(400, "InvalidRequest"), (405, "MethodNotAllowed"), (501, "No")])
    def test_a_refusal_is_final_whatever_was_asked(
        self, ask: Callable[[str, Fault], type[Exception]], operation: str, status: int, code: str
    ) -> None:
        assert ask(operation, answer(status, code)) is StorageError

    @pytest.mark.parametrize("operation", some(OPERATIONS, 3))
    @pytest.mark.parametrize("code", ["NoSuchBucket", "ContainerNotFound"])
    def test_a_missing_bucket_is_not_a_missing_object(
        self, ask: Callable[[str, Fault], type[Exception]], operation: str, code: str
    ) -> None:
        assert ask(operation, answer(404, code)) is StorageError

    @pytest.mark.parametrize(
        ("operation", "status", "code", "expected"),
        [
            ("get", 404, "NoSuchKey", NotFound),
            ("create", 412, "PreconditionFailed", AlreadyExists),
            ("create", 409, "BlobAlreadyExists", AlreadyExists),
            ("update", 412, "PreconditionFailed", Conflict),
            ("update", 404, "NoSuchKey", Conflict),
            # What S3 says to one of two conditional writes at once: it did nothing, and proves nothing.
            ("update", 409, "ConditionalRequestConflict", Conflict),
            ("create", 409, "ConditionalRequestConflict", TransientStorageError),
            ("put", 409, "OperationAborted", TransientStorageError),
            # Answers that nothing was asked for: certainly no invitation to read the object again.
            ("put", 412, "PreconditionFailed", StorageError),
            ("put", 404, "NoSuchKey", StorageError),
            ("create", 404, "NoSuchKey", StorageError),
            ("get_range", 416, "InvalidRange", InvalidInput),
        ],
    )
    def test_the_same_answer_means_what_was_asked(
        self,
        ask: Callable[[str, Fault], type[Exception]],
        operation: str,
        status: int,
        code: str,
        expected: type[Exception],
    ) -> None:
        assert ask(operation, answer(status, code)) is expected


class TestLostAnswers:
    @pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
    def test_a_conditional_write_is_sent_once_and_may_have_landed(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy, fault: Fault
    ) -> None:
        version = good.put_if("a", b"1", ABSENT)
        line.fail_next(fault)
        with pytest.raises(TransientStorageError):
            patient.put_if("a", b"2", Match(version))
        (sent,) = line.seen
        assert sent.headers["if-match"] in version
        assert content(good, "a") == b"2"

    @pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
    @pytest.mark.parametrize("times", [1, 3])
    def test_an_operation_on_a_cell_is_not_doubled(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy, fault: Fault, times: int
    ) -> None:
        cell_in(good).create(OpId(UUID(int=0)), 0)
        cell = cell_in(patient)
        line.fail_next(fault, "PUT", times=times)
        assert cell.update(Operations()(), increment) == 1
        assert cell.update(Operations(2)(), increment) == 2
        assert cell_in(good).read().value == 2

    def test_an_operation_is_not_doubled_though_its_own_success_looks_like_a_conflict(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        # As if something between us and the store had repeated a write whose answer it lost.
        cell_in(good).create(OpId(UUID(int=0)), 0)
        line.fail_next(answer(412, "PreconditionFailed", landed=True), "PUT")
        assert cell_in(patient).update(Operations()(), increment) == 1
        assert cell_in(good).read().value == 1

    @pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
    def test_a_cell_is_created_once(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy, fault: Fault
    ) -> None:
        line.fail_next(fault, "PUT")
        assert cell_in(patient).create(Operations()(), 5) == 5
        with pytest.raises(AlreadyExists):
            cell_in(good).create(Operations(2)(), 6)

    def test_a_creation_that_met_another_request_under_way_is_tried_again(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        line.fail_next(answer(409, "ConditionalRequestConflict"), "PUT", times=3)
        assert cell_in(patient).create(Operations()(), 5) == 5
        assert cell_in(good).read().value == 5

    def test_an_update_that_met_another_request_under_way_is_tried_again(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        cell_in(good).create(OpId(UUID(int=0)), 0)
        line.fail_next(answer(409, "ConditionalRequestConflict"), "PUT", times=3)
        cell = cell_in(patient)
        assert cell.update(Operations()(), increment) == 1
        assert cell.conflicts == 3

    def test_an_answer_that_never_comes_ends_with_the_timeout(
        self, server: Server, url: str, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        hasty = ObstoreStore(url, {**server.options_through(line.endpoint), "timeout": "200ms"})
        line.fail_next(hang(landed=True))
        with pytest.raises(TransientStorageError, match="no answer came in time"):
            hasty.put_if("a", b"1", ABSENT)
        (seen,) = line.seen
        assert line.wait(lambda: seen.status is not None)
        assert content(good, "a") == b"1"

    def test_changes_of_many_writers_in_a_storm_add_up(
        self, server: Server, url: str, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        writers, changes, given_up = 4, 15, itertools.count()
        cell_in(good).create(OpId(UUID(int=0)), 0)
        line.weather = Weather(STORM, seed=4)

        def work(number: int) -> None:
            through = ObstoreStore(url, server.options_through(line.endpoint))
            cell, new_op = cell_in(RetryingStore(through, env=Env(clock=ManualClock()))), Operations(100 + number)
            for _ in range(changes):
                op = new_op()
                while True:
                    try:
                        cell.update(op, increment)
                    except (Contended, OutcomeUnknown, TransientStorageError):
                        assert next(given_up) < 1000
                        continue
                    break

        together(*[lambda number=number: work(number) for number in range(writers)])
        assert cell_in(good).read().value == writers * changes
        lost = [
            seen for seen in line.seen if seen.fault in (reset(landed=True), answer(500, "InternalError", landed=True))
        ]
        assert sum(seen.method == "PUT" and seen.status in (200, 201) for seen in lost) > 3


class TestRetries:
    @pytest.mark.parametrize("fault", NEVER_CAME.values(), ids=NEVER_CAME)
    def test_reads_listings_plain_writes_and_deletes_continue_after_failures(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy, fault: Fault
    ) -> None:
        good.put("a", b"0123")
        for call in (
            lambda: content(patient, "a") == b"0123",
            lambda: bytes(patient.get_range("a", 1, 2)) == b"12",
            lambda: paths(patient) == ["a"],
            lambda: patient.put("b", b"new") is None,
            lambda: patient.delete("a") is None,
        ):
            line.fail_next(fault, times=3)
            assert call()
        assert paths(good) == ["b"]

    def test_a_write_whose_answer_was_lost_is_written_again(
        self, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        line.fail_next(reset(landed=True), "PUT", times=2)
        patient.put("a", b"1")
        assert [seen.status in (200, 201) for seen in line.seen] == [True] * 3
        assert content(good, "a") == b"1"

    def test_a_broken_listing_continues_where_it_broke(
        self, server: Server, patient: RetryingStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        pages = isinstance(server, S3Server)  # Azure's are too long to be worth filling
        names = [f"{number:04}" for number in range(1100 if pages else 20)]
        together(*[lambda some=names[start::4]: [good.put(name, b"") for name in some] and None for start in range(4)])
        listing = patient.list("")
        found = [next(listing).path for _ in range(10)]
        line.fail_next(reset(), "GET", times=2)
        assert found + [row.path for row in listing] == names
        assert len(line.seen) == (4 if pages else 1)

    def test_being_refused_is_not_tried_again(self, patient: RetryingStore, line: FaultyProxy) -> None:
        line.fail_next(answer(403, "AccessDenied"), times=9)
        for call in (lambda: patient.get("a"), lambda: list(patient.list("")), lambda: patient.put("a", b"")):
            line.seen.clear()
            with pytest.raises(StorageError, match="check the credentials"):
                call()
            assert len(line.seen) == 1


class TestOneRequest:
    def test_a_put_is_one_request(self, store: ObstoreStore, line: FaultyProxy) -> None:
        store.put("a", [b"one ", memoryview(b"two")])
        store.put("b", [b"x" * (1 << 20)] * 8)
        assert [seen.method for seen in line.seen] == ["PUT", "PUT"]
        assert len(content(store, "b")) == 8 << 20

    def test_a_large_put_goes_in_pieces_and_one_that_fails_leaves_the_old_object(
        self, store: ObstoreStore, good: ObstoreStore, line: FaultyProxy
    ) -> None:
        good.put("a", b"old")
        line.fail_next(answer(503, "SlowDown"), "PUT", containing="?")
        with pytest.raises(TransientStorageError):
            store.put("a", [b"x" * (1 << 20)] * 20)
        assert content(good, "a") == b"old"
        store.put("a", [b"x" * (1 << 20)] * 20)
        assert len(content(good, "a")) == 20 << 20

    def test_columns_are_read_in_one_request(self, store: ObstoreStore, good: ObstoreStore, line: FaultyProxy) -> None:
        good.put("a", b"0123456789")
        store.get("a")
        store.get_range("a", 2, 3)
        with pytest.raises(InvalidInput):
            store.get_range("a", 50, 3)
        assert [seen.method for seen in line.seen] == ["GET", "GET", "GET"]


@pytest.mark.matrix
class TestStoreInAStorm(ObjectStoreContract):
    """With retries, all calls that may be repeated succeed over a bad connection to a real server."""

    nests = False
    increments = 40
    many = 1001

    @pytest.fixture
    def store(self, s3_server: S3Server, s3_proxy: FaultyProxy) -> ObjectStore:
        s3_proxy.weather = Weather({reset(): 0.05, answer(503, "SlowDown"): 0.05}, seed=1, spares_conditional=True)
        s3_proxy.remember = False
        through = ObstoreStore(s3_server.url(BUCKET, fresh_prefix()), s3_server.options_through(s3_proxy.endpoint))
        return RetryingStore(through, env=Env(clock=ManualClock()))


@pytest.mark.matrix
def test_no_history_of_racing_failing_and_dying_writers_of_a_cell_loses_or_doubles_a_change(
    s3_place: Callable[[], ObjectStore], azure_place: Callable[[], ObjectStore]
) -> None:
    for place, seeds in ((s3_place, range(80)), (azure_place, range(80, 95))):
        histories = [play(seed, place=place(), faults=Faults(before=0.06, after=0.1, late=0.06)) for seed in seeds]
        assert sum(history.lost for history in histories) > len(seeds) / 4
        assert sum(history.conflicts for history in histories) > len(seeds) / 4
