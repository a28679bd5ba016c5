"""The queue consumer: one process takes batches in order and acknowledges them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Final, Literal, Self

from strandline.compat.v1.log import NamedFormat
from strandline.errors import InvalidInput, StrandlineError
from strandline.followers.consumer.background import ConsumerThreads
from strandline.followers.consumer.opening import DEFAULT_SLOT, ConsumerSource, queue_at
from strandline.followers.consumer.progress import AckProgress, AckStep
from strandline.followers.consumer.reader import BatchReader, ConsumedBatch, FetchHandle
from strandline.log.queue.contract import start_of
from strandline.log.read.reading import AHEAD_BYTES, pauses
from strandline.model.addresses import Address
from strandline.model.arguments import (
    SIGNED,
    TIMEOUT,
    ArgumentKind,
    Duration,
    Named,
    Positive,
    Prose,
    Timeout,
    checked,
)
from strandline.model.cursor import Start
from strandline.model.head import Descriptor
from strandline.storage.env import SYSTEM, Env
from strandline.storage.fork_check import Origin, bound_to_process
from strandline.storage.metrics import DESCRIPTORS

_LOGGER: Final = logging.getLogger(__name__)

OnPoison = Literal["raise", "dead-letter"]

BatchSequence = Annotated[int, ArgumentKind(SIGNED.admits, "a batch's sequence number (batch.sequence)")]


@bound_to_process(own=("next_batch",))
@checked(own=("next_batch",))  # a wrapper could be interrupted while it holds the batch
class Consumer:
    """Takes batches in order from a slot of any log, or from a queue of version 1, and acknowledges them.

    After any crash, the next consumer begins right after the last durable acknowledgement: no unacknowledged batch is
    skipped, no acknowledged one is delivered again. Batches are acknowledged in the order in which they are read, which
    may run ahead; durably after every ``ack_every`` of them and after :meth:`flush` or :meth:`close`.

    Opening claims the slot (which is created if there is none) and fences its former holder: that gets ``Fenced`` at
    its next read of the queue, durable acknowledgement or :meth:`flush`, and changes nothing.

    Safe in threads: one thread reads at a time, one acknowledges, and neither waits for the other. ``for batch in
    consumer`` and ``async for batch in consumer`` end when nothing is left; ``next_batch(timeout=…)`` waits for more.

    >>> import strandline as sl
    >>> log = sl.open("memory://doctest-consumer", create=True)
    >>> with log.producer() as producer:
    ...     handle = producer.produce([b"one", b"two"], metadata=b"from here")
    >>> with Consumer(log) as consumer:
    ...     batch = consumer.next_batch()
    ...     print(batch.values, [item.payload for item in batch.metadata])
    ...     consumer.ack(batch.sequence)
    [b'one', b'two'] [b'from here']
    >>> with Consumer(log) as consumer:
    ...     print(consumer.next_batch())
    None
    """

    def __init__(
        self,
        source: ConsumerSource,
        *,
        slot: str = DEFAULT_SLOT,
        last_acked: int | None = None,
        start: Start = "retained",
        holder: Named | None = None,
        ack_every: Positive = 100,
        on_poison: OnPoison = "raise",
        dead_letters: Address | None = None,
        trim_every: Duration | None = 300.0,
        format: NamedFormat | None = None,  # noqa: A002 - as in open
        options: Mapping[str, str] | None = None,
        env: Env = SYSTEM,
    ) -> None:
        """Claim the slot; durable when it returns.

        Args:
            source: An address, an opened log, or a queue. Of a write-ahead log, the one that its process writes: only
                that one changes slots. Of a node, its primary.
            slot: The slot's name; a queue of version 1 has only its own.
            last_acked: Acknowledge everything through this batch and start after it, which may move back. None starts
                at the slot's position.
            start: Where a new slot begins: at what is ``"retained"``, at the ``"beginning"``
                (``CursorExpired`` if that was trimmed), at ``"now"``, an offset, a time or a cursor. An existing one
                stays where it is.
            holder: A name that is unique to this running consumer; by default a new one. The same holder again
                fences no consumer.
            ack_every: After how many acknowledgements they are made durable.
            on_poison: How to handle a batch whose object is damaged or missing: ``"raise"``, which leaves the
                cursor before it, or ``"dead-letter"``, which stores its remains and continues, up to 16 times.
            dead_letters: Folder or bucket for dead letters, of a log that has no object store: a write-ahead log, or a
                node's. Needed there for ``on_poison="dead-letter"``.
            trim_every: Seconds between trims of the log in the background; None for none.
            format: ``"queue-v1"`` for a queue of version 1, or a ``sl.compat.QueueFormat`` with other paths.
            options: Settings of the store, as for ``open``.
            env: The clock, and the random source of the holder's name.

        Raises:
            SlotInvalid: The slot was invalidated; only a reset makes it valid again.
            InvalidInput: ``last_acked`` is not listed yet, or an option can never work.
            CursorExpired: The batch after ``last_acked`` is deleted.
        """
        self.holder: str = f"consumer-{env.chance.uuid().hex}" if holder is None else holder
        """The holder of the slot."""
        self._queue, self._opened = queue_at(
            source,
            slot=slot,
            start=start,
            format=format,
            dead_letters=dead_letters,
            sets_aside=on_poison == "dead-letter",
            options=options,
            env=env,
        )
        self._clock = env.clock
        self._acking = threading.Lock()  # protects acknowledgements, with their I/O
        self._state = threading.Lock()  # protects the numbers below; never held during I/O
        try:
            self._progress = AckProgress(self._queue.claim(self.holder, last_acked), ack_every=ack_every)
        except BaseException:
            if self._opened is not None:
                self._opened.close()
            raise
        self._reader = BatchReader(self._queue, self._progress, self._state, on_poison == "raise", env)
        with contextlib.suppress(StrandlineError):  # the first call that needs it raises
            self._reader.peek(0)  # the length is known from the beginning
        self._threads = ConsumerThreads(self, self._queue, trim_every=trim_every, env=env)
        self._reader.look = self._threads.look
        self._origin = Origin(f"The consumer of {self._queue.url}", self)

    def __repr__(self) -> str:
        return f"Consumer({self._queue.url!r}, slot={self._queue.slot!r}, holder={self.holder!r})"

    def next_batch(self, timeout: Timeout | None = 0.0) -> ConsumedBatch | None:
        """The next batch after the read cursor; None if none is listed within ``timeout`` seconds (None: for ever).

        None at once at the end of a sealed log, whatever the timeout.

        The cursor moves only when the batch was read: a call that failed or was interrupted gives the same batch again.
        In asyncio use :meth:`next_batch_async`: a cancelled ``asyncio.to_thread(consumer.next_batch)`` may drop the
        batch that its thread took. :meth:`ack` then refuses the one behind it, :meth:`ack_through` does not.
        """
        self._origin.check()
        if timeout is not None:
            TIMEOUT.check(timeout, "timeout")
        for pause in pauses(timeout, self._clock):
            batch = None
            try:
                with self._reader.lock:
                    batch = self._reader.fetch_next()
                    if batch is not None:
                        self._reader.hand_out([batch.descriptor])
                        return batch
            except BaseException:
                if batch is not None:  # interrupted before the caller got it: must not be acknowledged unseen
                    self._reader.take_back(batch.descriptor)
                raise
            if self._reader.ended:
                return None
            self._clock.sleep(pause)
        return None

    async def next_batch_async(self, timeout: Timeout | None = 0.0) -> ConsumedBatch | None:  # noqa: ASYNC109
        """The next batch, without blocking the event loop. A call that is cancelled leaves the cursor where it was.

        The batch is read in another thread, and counts as delivered only when the caller gets it.
        """
        for pause in pauses(timeout, self._clock):
            while (batch := await asyncio.to_thread(self._peek)) is not None:
                is_next = False
                try:
                    with self._state:
                        is_next = start_of(batch.descriptor) == self._progress.read  # else another call delivered it
                        if is_next:
                            self._progress.hand_out([batch.descriptor])
                            return batch
                except BaseException:
                    if is_next:  # a signal arrived before the caller got it
                        self._reader.take_back(batch.descriptor)
                    raise
            if self._reader.ended:
                return None
            await asyncio.sleep(pause)
        return None

    def __iter__(self) -> Iterator[ConsumedBatch]:
        """All batches after the read cursor, in order, until there are no more now: :meth:`batches`."""
        return self.batches()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConsumedBatch:
        batch = await self.next_batch_async()
        if batch is None:
            raise StopAsyncIteration
        return batch

    def _peek(self) -> ConsumedBatch | None:
        self._origin.check()
        with self._reader.lock:
            return self._reader.fetch_next()

    def next_descriptors(self, max: int) -> list[Descriptor]:  # noqa: A002 - its public name
        """Up to ``max`` consecutive descriptors after the read cursor, which moves past them; no data is read.

        The caller is responsible for them: lost ones are delivered again only to a new consumer.
        """
        self._reader.check_open()
        if max == 0:
            return []
        with self._reader.lock:
            found = self._reader.peek(max)
            DESCRIPTORS.inc(len(found))
            self._reader.hand_out(found)
            return found

    def descriptors_between(self, first: int, last: int) -> list[Descriptor]:
        """The listed batches ``first`` through ``last``, to read them again; moves nothing.

        ``CursorExpired`` if some of them are deleted.
        """
        self._reader.check_open()
        if first > last:
            raise InvalidInput(f"There are no batches from {first} through {last}.")
        return list(self._queue.between(first, last))

    def fetch_handle(self) -> FetchHandle:
        """The reader of batches by their descriptors, in any process; this consumer can continue meanwhile."""
        return self._reader.handle

    def batches(self, *, parallel: Positive = 4, ahead: Positive = AHEAD_BYTES) -> Iterator[ConsumedBatch]:
        """All batches after the read cursor, in order, until there are no more; then it can be called again.

        Up to ``parallel`` are read at once, and about ``ahead`` bytes of memory early, where sizes are known. The read
        cursor moves as batches are delivered. An iterator skips batches that another call has delivered meanwhile.
        """
        self._reader.check_open()
        return self._reader.batches(parallel=parallel, ahead=ahead)

    def dead_letter(self, descriptor: Descriptor, reason: Prose) -> str:
        """Durably set an unusable batch aside, and count it as acknowledged in its turn; returns its location.

        For callers that fetch by descriptors. ``TooManyDeadLetters`` beyond the limit; ``InvalidInput`` if the batch is
        acknowledged already.
        """
        self._reader.check_open()
        with self._reader.lock:
            return self._reader.set_aside(descriptor, reason)

    def ack(self, sequence: BatchSequence) -> None:
        """Acknowledge the next batch; every ``ack_every`` of them are made durable.

        ``OutOfOrderAck`` naming the next one if this is not it. If the durable step fails, nothing has changed and
        the same call may be repeated.
        """
        with self._acking:
            self._reader.check_open()
            self._do(lambda: self._progress.ack(sequence))

    def ack_through(self, sequence: BatchSequence) -> None:
        """Acknowledge everything through a batch that was handed out; durable when it returns.

        ``OutOfOrderAck`` if it was acknowledged already or not handed out yet. ``Fenced`` and storage errors leave
        everything as it was.
        """
        with self._acking:
            self._reader.check_open()
            self._do(lambda: self._progress.ack_through(sequence))

    def flush(self) -> None:
        """Make every acknowledgement durable, and make sure that this is still the only consumer: else ``Fenced``."""
        with self._acking:
            self._reader.check_open()
            if not self._do(self._progress.flush):
                self._reader.peek(0)

    def _do(self, plan: Callable[[], AckStep | None]) -> bool:
        """Execute a planned step, and return whether there is one."""
        with self._state:
            step = plan()
        if step is None:
            return False
        length = None if step.through is None else self._queue.acknowledge(step.through)
        with self._state:
            before = self._progress.durable
            self._progress.done(step)
            self._reader.acknowledged(self._progress.durable - before, length)
        return True

    def close(self) -> None:
        """Flush and stop; a new consumer then starts right after. The trimmer is stopped even if the flush fails.

        A failed flush is raised, and closing may be repeated.
        """
        with self._acking:
            if self._reader.closed:
                return
            self._threads.halt()
            try:
                self._do(self._progress.flush)
                self._reader.closed = True
            finally:
                self._threads.stop()
            if self._opened is not None:
                self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            _LOGGER.warning("%r could not be closed after another failure: %s", self, failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def __len__(self) -> int:
        """How many batches are listed and not durably acknowledged, as of the last access to the queue; no I/O."""
        return self._reader.length

    def __bool__(self) -> bool:
        """True, also if nothing is listed."""
        return True

    @property
    def is_empty(self) -> bool:
        """Whether every listed batch is durably acknowledged, as of the last access to the queue; no I/O."""
        return len(self) == 0

    @property
    def next_to_read(self) -> int:
        """The next sequence to deliver."""
        return self._reader.position

    @property
    def next_to_ack(self) -> int:
        """The next sequence to acknowledge."""
        with self._state:
            return self._progress.acknowledged

    @property
    def conflict_rate(self) -> float:
        """Percentage of this consumer's conditional writes that lost a race."""
        writes = self._queue.writes()
        return 100.0 * writes.lost / writes.done if writes.done else 0.0

    @property
    def dead_letters(self) -> int:
        """Number of batches that this consumer has set aside."""
        return self._reader.dead_letters

    @property
    def lag(self) -> float | None:
        """Seconds between ingestion and reading of the last batch with metadata; None before one."""
        return self._reader.lag
