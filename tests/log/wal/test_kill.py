"""``kill -9`` of real appenders, over and over: acknowledged records are there, in order and without a gap."""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import pytest

from strandline.compat.spool.lsn_log import WriteAheadLog
from strandline.errors import Fenced
from strandline.log.wal.names import LOCK
from strandline.log.wal.read.reading import WalReader
from strandline.model.cursor import Cursor
from tests.log.wal.programs import SLOT, Follower, Life, Nest, Note, Said, What, said_in
from tests.matrix_cases import some

PATIENCE = 120.0
BATCH = 3


@dataclass(slots=True)
class Story:
    """The acknowledgements of the appenders, and the records found after each was killed."""

    folder: str
    acknowledged: dict[int, Said] = field(default_factory=dict)
    """By lsn."""
    found: dict[int, Said] = field(default_factory=dict)
    pinned: int = 0
    trimmed: int = 0
    kills: int = 0

    def hear(self, life: int, note: Note) -> int:
        """Record the acknowledgements of an appender; returns the number of acknowledged records."""
        match note.what:
            case What.OPENED:
                assert note.one >= max(self.found, default=0), "the end went back when it was opened"
            case What.APPENDED | What.BATCHED:
                count = BATCH if note.what is What.BATCHED else 1
                for index in range(count):
                    said = Said(life, note.one, note.two + index)
                    before = self.acknowledged.setdefault(note.three + index, said)
                    assert before == said, f"lsn {note.three + index} was given to {before} and to {said}"
                return count
            case What.PINNED:
                self.pinned = max(self.pinned, note.one)
            case What.PRUNED:
                assert note.one <= self.pinned, "what the slot needs was trimmed"
                self.trimmed = max(self.trimmed, note.one)
        return 0

    def lacks(self, *, trims: bool) -> bool:
        """Whether something has still to happen that a slow machine may leave out: a trim, or a file that is full."""
        return not self.trimmed if trims else len(list(Path(self.folder).glob("*.log"))) <= 2

    def look(self, *, whole: bool = False) -> None:
        """Read all records, and compare them with the acknowledged ones and with the last read."""
        reader = WalReader(self.folder)
        bounds = reader.bounds()
        assert bounds.next >= max(self.acknowledged, default=0), "the end is below what was acknowledged"
        assert bounds.next >= max(self.found, default=0), "the end is below what could be read before"
        assert self.trimmed <= bounds.first <= self.pinned, "the log begins where nobody said"
        # What was read before is read once more at the end, and not each time.
        since = bounds.first if whole else max(bounds.first, max(self.found, default=0))
        following = since + 1
        for span in reader.plan(Cursor(reader.log_id, since)):
            for batch in span.fetch(["offset", "value"]):
                for offset, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    lsn, said = offset + 1, said_in(value)
                    assert lsn == following, f"lsn {following} is missing"
                    following += 1
                    assert self.found.setdefault(lsn, said) == said, f"lsn {lsn} holds something else than it did"
                    assert self.acknowledged.get(lsn, said) == said, f"lsn {lsn} was acknowledged to another"
        assert following == bounds.next + 1
        missing = [lsn for lsn in self.acknowledged if bounds.first < lsn and lsn not in self.found]
        assert not missing, f"acknowledged and gone: {missing[:5]}"
        for slot in reader.slots.list():
            assert bounds.first <= slot.position <= self.pinned, "the slot stands where nobody put it"

    def check_order(self, *, whole: bool) -> None:
        """Each thread of each life appended in order, once each; only its last append may not be acknowledged."""
        counters: dict[tuple[int, int], list[int]] = defaultdict(list)
        for lsn in sorted(self.found):
            said = self.found[lsn]
            counters[said.life, said.thread].append(said.counter)
        last: dict[tuple[int, int], int] = defaultdict(lambda: -1)
        for said in self.acknowledged.values():
            last[said.life, said.thread] = max(last[said.life, said.thread], said.counter)
        for who, came in counters.items():
            assert came == sorted(set(came)), f"{who} came in this order: {came}"
            assert not whole or came == list(range(len(came))), f"of {who} something is missing: {came}"
            assert came[-1] <= last[who] + (BATCH if who[1] % 8 == 7 else 1), f"{who} went on without an answer"


def kill_in_a_loop(tmp_path: Path, *, kills: int, seed: int, trims: bool = False) -> Story:
    """Start an appender on the same folder repeatedly, and kill it after enough acknowledgements or while it opens."""
    chance = random.Random(seed)
    story = Story(str(tmp_path / "log"))
    with ExitStack() as held:
        nest = held.enter_context(Nest(tmp_path / "errors"))
        follower = None
        for life in range(kills):
            # Some die before they have opened it, and most while they append, at any moment of a group.
            enough = 0 if life and life % 4 == 3 else chance.randrange(1, 500)
            pid = nest.start(Life(life, story.folder, trims=trims))
            told = 0
            while told < enough or (life == kills - 1 and story.lacks(trims=trims)):
                told += story.hear(life, nest.read())
            os.kill(pid, signal.SIGKILL)
            for note in nest.rest():
                story.hear(life, note)
            story.kills += 1
            story.look()
            if follower is None:
                follower = held.enter_context(Follower(story.folder, tmp_path / "seen"))
        assert follower is not None
        end = WalReader(story.folder).bounds().next
        seen = follower.finish(end, PATIENCE)
    story.look(whole=True)
    story.check_order(whole=not trims)
    check_seen(story, seen, whole=not trims)
    # Who opens it may find one more group: durable, and neither published nor acknowledged when its appender died.
    assert seen[-1][0] + seen[-1][1] == end
    return story


def check_seen(story: Story, seen: list[tuple[int, int, int]], *, whole: bool) -> None:
    """Records that another process read meanwhile equal those that are there now, without a gap."""
    assert seen
    values = dict[int, bytes]()
    with WriteAheadLog.open(story.folder) as wal:
        for lsn in range(wal.oldest - 1, wal.current, 5000):
            values.update((record.lsn, record.payload) for record in wal.read_since(lsn, 5000))
    following = seen[0][0]
    compared = 0
    for first, count, checksum in seen:
        assert first == following or (not whole and first > following), f"offset {following} was skipped"
        following = first + count
        lsns = range(first + 1, following + 1)
        if all(lsn in values for lsn in lsns):
            compared += count
            assert crc32(b"".join(values[lsn] for lsn in lsns)) == checksum, f"offsets {first} and on were not that"
        assert whole is False or following <= max(values), "something was seen that is not there any more"
    assert compared or not whole


@pytest.mark.parametrize("kills", some([2, 4, 8], 1))
def test_whatever_was_acknowledged_survives_that_its_appender_is_killed_again_and_again(tmp_path: Path, kills: int):
    story = kill_in_a_loop(tmp_path, kills=kills, seed=1)
    assert story.kills == kills
    assert min(story.found) == 1
    assert len(list((tmp_path / "log").glob("*.log"))) > 2, "no file was ever full"


@pytest.mark.matrix
def test_whatever_was_acknowledged_and_is_retained_survives_kills_beside_trimming(tmp_path: Path):
    story = kill_in_a_loop(tmp_path, kills=5, seed=2, trims=True)
    assert story.trimmed > 0
    assert [slot.name for slot in WalReader(story.folder).slots.list()] == [SLOT]


@pytest.mark.slow
@pytest.mark.parametrize("trims", [False, True])
def test_a_hundred_kills_lose_and_double_nothing(tmp_path: Path, trims: bool):
    story = kill_in_a_loop(tmp_path, kills=100, seed=3, trims=trims)
    assert story.kills == 100
    assert len(story.acknowledged) > 10_000


@pytest.mark.matrix
def test_a_second_opener_learns_which_process_has_the_log(tmp_path: Path):
    folder = str(tmp_path / "log")
    with Nest(tmp_path / "errors") as nest:
        pid = nest.start(Life(0, folder, threads=2))
        assert nest.read().what is What.OPENED
        with pytest.raises(Fenced, match=rf"process {pid} on"):
            WriteAheadLog.open(folder)
        assert nest.read().what in (What.APPENDED, What.BATCHED), "it goes on undisturbed"
        os.kill(pid, signal.SIGKILL)
        list(nest.rest())
        assert f"process {pid} " in (tmp_path / "log" / LOCK).read_text(), "its lock file is still there"
        with WriteAheadLog.open(folder) as wal:
            assert wal.append(b"mine") == wal.current
            assert f"process {os.getpid()} " in (tmp_path / "log" / LOCK).read_text()
            with pytest.raises(Fenced, match=rf"process {os.getpid()} on"):
                WriteAheadLog.open(folder)


@pytest.mark.parametrize("text", [b"", b"process 1 on elsewhere\n", b"\xff\x00 no text at all", b"x" * 5000])
def test_the_content_of_a_dead_process_s_lock_file_does_not_matter(tmp_path: Path, text: bytes):
    folder = tmp_path / "log"
    WriteAheadLog.open(folder).close()
    (folder / LOCK).write_bytes(text)
    with WriteAheadLog.open(folder) as wal:
        assert wal.append(b"first") == 1
        assert (folder / LOCK).read_text().startswith(f"process {os.getpid()} on ")
