"""``kill -9`` of real producers, consumers and trimmers, over and over, on a real S3 server."""

from __future__ import annotations

import random
import subprocess
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

import strandline as sl
from strandline.bulk.verifying import verify as verify_log
from strandline.compat.v1.log import QueueFormat
from strandline.log.findings import Severity
from tests.log.object.programs import SOON, V1_GRACE, Job, read_notes, start, tell, values_of
from tests.servers import S3Server

Note = dict[str, Any]

SPARE = 1

OWN = {"append": ["append-0"], "produce": ["produce-0"], "consume": ["audit", "work"], "trim": ["trim"]}
QUEUE = {"append": ["append-0"], "produce": ["produce-0"], "consume": ["work"], "trim": ["trim"]}


# --- the crew ----------------------------------------------------------------------------------------------------


class Crew:
    """Programs that run until they are killed, and are then started again. A context manager that leaves none."""

    def __init__(
        self, folder: Path, roles: dict[str, list[str]], *, url: str, server: S3Server, queue: bool = False
    ) -> None:
        self._folder = folder
        self._jobs = {
            name: Job(role, name, url, str(folder / f"{name}.jsonl"), options=server.options, queue=queue)
            for role, names in roles.items()
            for name in names
        }
        self._lives: Counter[str] = Counter()
        self._before: dict[str, int] = {}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._spare: deque[subprocess.Popen[str]] = deque()
        self.killed: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._hire(len(self._jobs) + SPARE)
        for name in self._jobs:
            self._start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._running.values(), *self._spare):
            process.kill()
            process.communicate()

    def _hire(self, count: int) -> None:
        """Starting takes longer than anything else here, so that some are started before they are needed."""
        self._spare.extend(start(self._folder / "errors") for _ in range(count))

    def _start(self, name: str) -> None:
        self._before[name] = self._noted(name)
        process = self._running[name] = self._spare.popleft()
        tell(process, replace(self._jobs[name], life=self._lives[name]))
        self._lives[name] += 1

    def _noted(self, name: str) -> int:
        path = Path(self._jobs[name].notes)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def kill(self, chance: random.Random) -> None:
        """Kill one of them at some moment after it has got something done in this life, and start it again."""
        victim = chance.choice(sorted(self._jobs))
        enough = self._before[victim] + chance.randint(1, 6)
        self.wait_for(lambda: self._noted(victim) >= enough)
        until = time.monotonic() + chance.choice([0.0, 0.02, 0.2]) * chance.random()
        self.wait_for(lambda: time.monotonic() >= until)
        process = self._running.pop(victim)
        process.kill()
        process.communicate()
        self.killed[self._jobs[victim].role] += 1
        self._start(victim)
        self._hire(1)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Look until something is so; none of the programs may end meanwhile by itself."""
        began = time.monotonic()
        while not condition():
            for name, process in self._running.items():
                assert process.poll() is None, f"{name} ended by itself: {self._last_words()}"
            assert time.monotonic() - began < SOON, "Nothing happens any more."
            time.sleep(0.005)

    def _last_words(self) -> str:
        return (self._folder / "errors").read_text(errors="replace")[-2000:]

    def finish(self, *roles: str) -> None:
        """Tell those who do this to stop, and wait until they have."""
        leaving = [name for name in self._running if self._jobs[name].role in roles]
        for name in leaving:
            tell(self._running[name], "stop")
        for name in leaving:
            assert self._running[name].wait(SOON) == 0, f"{name}: {self._last_words()}"
            self._running.pop(name).communicate()

    def story(self) -> Story:
        """The notes of all programs."""
        story = Story(self.killed, queue=next(iter(self._jobs.values())).queue)
        for name, job in self._jobs.items():
            getattr(story, job.role)[name] = read_notes(job.notes)
        return story


# --- what must be true -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Story:
    """The notes of all programs by role and name, over all of their lives."""

    killed: Counter[str] = field(default_factory=Counter)
    queue: bool = False
    append: dict[str, list[Note]] = field(default_factory=dict)
    produce: dict[str, list[Note]] = field(default_factory=dict)
    consume: dict[str, list[Note]] = field(default_factory=dict)
    trim: dict[str, list[Note]] = field(default_factory=dict)

    def notes(self, what: str, *roles: str) -> Iterator[Note]:
        for role in roles or ("append", "produce", "consume", "trim"):
            for notes in getattr(self, role).values():
                yield from (note for note in notes if note["what"] == what)

    def complaints(self) -> list[str]:
        """All violations."""
        said = [f"{note['kind']}: {note['said']}" for note in self.notes("error")]
        said += [f"slots were invalidated: {note}" for note in self.notes("trimmed") if note["invalidated"]]
        batches: dict[int, Note] = {}
        for slot, notes in self.consume.items():
            said += _deliveries(slot, notes)
            given = [note for note in notes if note["what"] == "given"]
            for note in given:
                if batches.setdefault(note["sequence"], note) != note:
                    said.append(f"batch {note['sequence']} was once {batches[note['sequence']]} and then {note}")
            seen = {value for note in given for value in note["values"]}
            said += [f"{value} was acknowledged and never came to {slot}" for value in self._acknowledged() - seen]
        listed = [batches[sequence] for sequence in sorted(batches)]
        if sorted(batches) != list(range(len(batches))):
            said.append(f"{len(batches)} batches came, and the last of them is {max(batches)}")
        return [*said, *self._listing(listed), *self._order(listed), *self._receipts(listed)]

    def _acknowledged(self) -> set[str]:
        return {value for note in self.notes("acknowledged") for value in note["values"]}

    def _listing(self, listed: list[Note]) -> Iterator[str]:
        """What is listed is listed once, at one offset after the other, in the order of each writer's numbers."""
        offset, last = 0, Counter[str]()
        for batch in listed if not self.queue else ():
            count = len(batch["values"])
            if batch["offsets"] != list(range(offset, offset + count)):
                yield f"batch {batch['sequence']} has the offsets {batch['offsets']} where {offset} is next"
            offset += count
            writer, number = batch["mark"]
            if number != last[writer]:
                yield f"batch {batch['sequence']} has number {number} of {writer}, where {last[writer]} is next"
            last[writer] += 1
        tries = self._tries()
        for value, times in Counter(value for batch in listed for value in batch["values"]).items():
            # A queue of version 1 does not know again what was acknowledged before its writer asked a second time.
            if times > (max(1, tries[value]) if self.queue else 1):
                yield f"{value} is listed {times} times"

    def _tries(self) -> Counter[str]:
        """How often each value was tried to be appended."""
        tries = Counter[str]()
        for name, notes in self.append.items():
            for note in notes:
                tries.update(values_of(name, note["number"]) if note["what"] == "try" else ())
        return tries

    def _order(self, listed: list[Note]) -> Iterator[str]:
        """Appends are whole and in order; of what one life has produced a beginning is there, in order."""
        came: dict[str, list[int]] = defaultdict(list)
        for batch in listed:
            first = batch["values"][0]
            if first.startswith("append"):
                name, number, _ = first.split("/")
                if batch["values"] != values_of(name, int(number)):
                    yield f"a batch of {first} holds {batch['values']}"
                came[name].append(int(number))
            else:
                for value in batch["values"]:
                    series, _, number = value.rpartition("/")
                    came[series].append(int(number))
        for series, numbers in came.items():
            firsts = list(dict.fromkeys(numbers))
            if firsts != list(range(len(firsts))):
                yield f"{series} came in this order: {numbers}"

    def _receipts(self, listed: list[Note]) -> Iterator[str]:
        """Each value is at the offset that its writer got."""
        at: dict[str, set[int]] = defaultdict(set)
        for batch in listed:
            for offset, value in zip(batch["offsets"], batch["values"], strict=True):
                at[value].add(offset)
        for note in self.notes("acknowledged"):
            for value, offset in zip(note["values"], self._told(note), strict=True):
                if offset is not None and value in at and offset not in at[value]:
                    yield f"{value} is at {at[value]}, and its writer was told {offset}"

    def _told(self, note: Note) -> list[int | None]:
        if "offsets" in note:
            return note["offsets"]
        first, count = note["first"], len(note["values"])
        return [first] * count if first is None or self.queue else list(range(first, first + count))


def _deliveries(slot: str, notes: list[Note]) -> Iterator[str]:
    """One slot over the lives of its consumer: nothing is skipped, and nothing comes again that was acknowledged."""
    expected = durable = noted = 0
    for note in notes:
        match note["what"]:
            case "opened":
                expected = note["next"]
                if expected < durable:
                    yield f"{slot} begins with batch {expected} again, and had acknowledged everything below {durable}"
                if expected > noted:
                    yield f"{slot} begins with batch {expected}, and had noted only those below {noted}"
            case "given":
                if note["sequence"] != expected:
                    yield f"{slot} was given batch {note['sequence']} where {expected} was next"
                expected += 1
                noted = max(noted, expected)
            case "durable":
                durable = max(durable, note["next"])


# --- the loop ----------------------------------------------------------------------------------------------------


def kill_in_a_loop(crew: Crew, look: Callable[[], None], *, kills: int, seed: int) -> Story:
    """Kill programs over and over, check the stored data now and then, and let the remaining ones finish."""
    chance = random.Random(seed)
    with crew:
        for number in range(1, kills + 1):
            crew.kill(chance)
            if number % 6 == 0:
                look()
        crew.finish("append", "produce")
        crew.finish("consume")
        crew.finish("trim")
    look()
    return crew.story()


def kill_on_a_log(folder: Path, url: str, server: S3Server, *, kills: int, seed: int) -> Story:
    log = sl.open(url, create=True, retention="consumed", options=server.options)
    for slot in OWN["consume"]:
        log.slots.create(slot, 0)

    def look() -> None:
        found = verify_log(log).findings
        assert [str(finding) for finding in found if finding.severity is Severity.DAMAGE] == []

    story = kill_in_a_loop(Crew(folder, OWN, url=url, server=server), look, kills=kills, seed=seed)
    assert story.complaints() == []
    # Whatever the killed had left behind is waste, and the next trims find all of it.
    for _ in range(3):
        log.trim(grace=0, everything=True)
    assert [str(finding) for finding in verify_log(log).findings] == []
    assert log.bounds().first == log.bounds().next > 0, "everything was consumed"
    assert [item.path for item in log.store.list("batches/")] == []
    return story


@pytest.mark.matrix
def test_killing_producers_consumers_and_trimmers_of_a_log_loses_and_doubles_nothing(
    tmp_path: Path, s3_url: str, s3_server: S3Server
) -> None:
    story = kill_on_a_log(tmp_path, s3_url, s3_server, kills=8, seed=6)
    assert set(story.killed) == set(OWN), "one of each role at least"
    assert sum(note["deleted"] for note in story.notes("trimmed")) > 0


@pytest.mark.slow
def test_killing_many_more_of_them_loses_and_doubles_nothing(tmp_path: Path, s3_url: str, s3_server: S3Server) -> None:
    story = kill_on_a_log(tmp_path, s3_url, s3_server, kills=30, seed=2)
    assert min(story.killed[role] for role in OWN) > 3, story.killed
    assert sum(note["deleted"] for note in story.notes("trimmed")) > 100
    assert sum(note["orphans"] for note in story.notes("trimmed")) > 0


@pytest.mark.matrix
def test_killing_producers_consumers_and_trimmers_of_a_queue_of_version_1_loses_nothing(
    tmp_path: Path, s3_url: str, s3_server: S3Server
) -> None:
    queue = sl.open(s3_url, format=QueueFormat(grace=V1_GRACE), options=s3_server.options)
    crew = Crew(tmp_path, QUEUE, url=s3_url, server=s3_server, queue=True)
    story = kill_in_a_loop(crew, lambda: None, kills=6, seed=4)
    assert set(story.killed) == set(QUEUE), "one of each role at least"
    assert story.complaints() == []
    assert queue.manifest().entries == ()
    # Nothing is left of what was consumed, nor of what the killed had uploaded and never listed, once it is old. Nobody
    # writes any more, so that anything is old at once; a clock set ahead would not do, as the server's counts as well.
    sl.open(s3_url, format=QueueFormat(grace=0.001), options=s3_server.options).trim()
    assert [item.path for item in queue.store.list("")] == [queue.manifest_path]


# --- what the checks see -----------------------------------------------------------------------------------------


def quiet_story() -> Story:
    """One writer with two numbers, one life of a producer, and one slot whose consumer died once."""
    first = given(0, ["append-0/0/0"], 0, ("a", 0))
    second, again = (given(1, ["produce-0/0.0/0", "produce-0/0.0/1"], 1, ("p", 0)) for _ in range(2))
    third = given(2, ["append-0/1/0", "append-0/1/1"], 3, ("a", 1))
    return Story(
        append={
            "append-0": [
                {"what": "try", "number": 0},
                {"what": "acknowledged", "values": ["append-0/0/0"], "first": 0},
                {"what": "try", "number": 1},
                {"what": "acknowledged", "values": ["append-0/1/0", "append-0/1/1"], "first": 3},
            ]
        },
        produce={"produce-0": [{"what": "acknowledged", "values": ["produce-0/0.0/0"], "offsets": [1]}]},
        consume={
            "work": [opened(0), first, second, durable(1), opened(1), again, third, durable(3)],
        },
        trim={"trim": [{"what": "trimmed", "deleted": 3, "orphans": 0, "floor": 5, "invalidated": []}]},
    )


def given(sequence: int, values: list[str], first: int, mark: tuple[str, int]) -> Note:
    offsets = list(range(first, first + len(values)))
    return {"what": "given", "sequence": sequence, "offsets": offsets, "values": values, "mark": list(mark)}


def opened(sequence: int) -> Note:
    return {"what": "opened", "next": sequence}


def durable(sequence: int) -> Note:
    return {"what": "durable", "next": sequence}


def test_a_story_in_which_all_went_well_has_no_complaints():
    assert quiet_story().complaints() == []


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (
            lambda story: story.consume["work"].__delitem__(slice(1, 3)),
            "begins with batch 1, and had noted only those below 0",
        ),
        (lambda story: story.consume["work"].pop(6), "append-0/1/0 was acknowledged and never came to work"),
        (lambda story: story.consume["work"].insert(4, durable(2)), "had acknowledged everything below 2"),
        (lambda story: story.consume["work"].pop(5), "was given batch 2 where 1 was next"),
        (lambda story: story.consume["work"][5]["values"].reverse(), "batch 1 was once"),
        (lambda story: story.consume["work"][6].update(offsets=[4, 5]), "has the offsets [4, 5] where 3 is next"),
        (lambda story: story.consume["work"][6].update(mark=["a", 2]), "has number 2 of a, where 1 is next"),
        (lambda story: story.consume["work"][6].update(values=["append-0/0/0", "x"]), "is listed 2 times"),
        (lambda story: story.consume["work"][6]["values"].reverse(), "a batch of append-0/1/1 holds"),
        (lambda story: [story.consume["work"][at]["values"].reverse() for at in (2, 5)], "came in this order: [1, 0]"),
        (lambda story: story.produce["produce-0"][0].update(offsets=[2]), "its writer was told 2"),
        (lambda story: story.trim["trim"][0].update(invalidated=["work"]), "slots were invalidated"),
        (
            lambda story: story.consume["work"].append({"what": "error", "kind": "NotFound", "said": "x"}),
            "NotFound: x",
        ),
    ],
)
def test_a_story_in_which_something_went_wrong_is_seen(harm: Callable[[Story], object], complaint: str):
    story = quiet_story()
    harm(story)
    assert any(complaint in said for said in story.complaints()), story.complaints()
