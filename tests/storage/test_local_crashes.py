"""The local store on a disk that crashes at every operation, in every way: what was acknowledged is there."""

import contextlib

import pytest

from strandline.errors import AlreadyExists, NotFound
from strandline.storage.env import Env
from strandline.storage.objects.local import LocalStore
from strandline.storage.objects.store import ABSENT, Match
from strandline.testing.clock import SeededChance
from strandline.testing.simdisk import crash_everywhere

PATHS = ("head", "batches/1/a", "batches/1/b", "batches/2/a")


def store_on(disk, number):
    return LocalStore("/root/log", env=Env(disk=disk, chance=SeededChance(number)))


def found(store):
    values = {}
    for path in PATHS:
        try:
            values[path] = bytes(store.get(path).data)
        except NotFound:
            continue
    return values


def work(disk, notes):
    """Put what is not there yet, and then change the head: what was acknowledged is noted."""
    store = store_on(disk, len(notes))
    for path in PATHS:
        notes.append(("begun", path))
        with contextlib.suppress(AlreadyExists):  # then it is there, and will be
            store.put_if(path, path.encode(), ABSENT)
        notes.append(("there", path))
    for value in (b"one", b"two"):
        notes.append(("begun", "head", value))
        store.put_if("head", value, Match(store.get("head").version))
        notes.append(("there", "head", value))


def check(disk, notes):
    values = found(store_on(disk, len(notes)))
    for note in notes:
        assert note[0] == "begun" or note[1] in values, f"{note[1]} was acknowledged and is gone"
    changes = [note for note in notes if len(note) == 3]
    if changes and "head" in values:
        done = max((at for at, note in enumerate(changes) if note[0] == "there"), default=None)
        allowed = {note[2] for note in changes[done if done is not None else 0 :]}
        assert values["head"] in (allowed if done is not None else {b"head", *allowed})
    for path, value in values.items():
        assert path == "head" or value == path.encode()


@pytest.mark.matrix
def test_acknowledged_records_outlive_every_crash(capsys):
    explored = crash_everywhere(work, check, again=3)
    assert explored.states > 100
    with capsys.disabled():
        print(f"\nlocal store: {explored}")


class Trusting(LocalStore):
    """Broken: counts an existing folder as durable, whichever process created it."""

    def _ensure(self, folder):
        self._env.disk.make_folders(folder)


@pytest.mark.matrix
def test_a_store_that_trusts_the_folders_it_finds_is_caught(monkeypatch):
    monkeypatch.setitem(work.__globals__, "LocalStore", Trusting)
    with pytest.raises(AssertionError, match="is gone"):
        crash_everywhere(work, check, again=3)
