"""The segment cache beside a model that keeps everything in plain lists and looks at every offset."""

import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.errors import InvalidInput
from strandline.model.segments import (
    PartitionDelete,
    PartitionDeleteState,
    SegmentId,
    SegmentMetadata,
    SegmentState,
    SegmentUpdate,
    TopicPartition,
)
from strandline.tier.metadata import cache as cache_module
from strandline.tier.metadata import cache_rows
from strandline.tier.metadata import terms as terms_module
from strandline.tier.metadata.cache import SegmentCache
from strandline.tier.metadata.columns import SegmentColumns
from strandline.tier.metadata.lifecycle import add_segment, advance_deletion, update_segment
from tests.matrix_cases import examples, some

PARTITIONS = [
    TopicPartition("a", UUID(int=1), 0),
    TopicPartition("a", UUID(int=1), 1),
    TopicPartition("b", UUID(int=2), 0),
]
OFFSETS = range(26)
TERMS = range(4)
REMEMBERED = 3


def stretch(segment, term):
    """The offsets that the segment has of this term; None if it does not have the term."""
    for at, (number, start) in enumerate(segment.terms):
        if number == term:
            following = segment.terms[at + 1][1] if at + 1 < len(segment.terms) else segment.end + 1
            return range(max(start, segment.start), min(following, segment.end + 1))
    return None


@dataclass
class Model:
    """Kafka's rules on plain dictionaries. Nothing is clever here."""

    segments: dict = field(default_factory=dict)
    removed: OrderedDict = field(default_factory=OrderedDict)
    deletions: dict = field(default_factory=dict)
    order: dict = field(default_factory=dict)
    """(partition, term) -> {first offset: segment}: what Kafka's lookups go by."""
    highest: dict = field(default_factory=dict)

    def is_deleted(self, partition):
        deletion = self.deletions.get(partition)
        return deletion is not None and deletion.state is PartitionDeleteState.FINISHED

    def apply(self, event):
        match event:
            case SegmentMetadata():
                current = self.segments.get(event.segment) or self.removed.get(event.segment)
                after = add_segment(current, event)
                if current is None and self.is_deleted(event.segment.partition):
                    raise InvalidInput("deleted")
                self.segments[event.segment] = after
                return after is not current
            case SegmentUpdate():
                current = self.segments.get(event.segment) or self.removed.get(event.segment)
                after = update_segment(current, event)
                if after is current:
                    return False
                self.move(current, after)
                return True
            case PartitionDelete():
                current = self.deletions.get(event.partition)
                after = advance_deletion(current, event)
                self.deletions[event.partition] = after
                if self.is_deleted(event.partition):
                    self.clear(event.partition)
                return after is not current

    def clear(self, partition):
        self.segments = {of: segment for of, segment in self.segments.items() if of.partition != partition}
        for known in (self.order, self.highest):
            for key in [key for key in known if key[0] == partition]:
                del known[key]

    def move(self, before, after):
        of = after.segment
        self.segments[of] = after
        if after.state is SegmentState.COPY_FINISHED:
            for term, _ in after.terms:
                self.finish(of, term, stretch(after, term))
        if before.state is SegmentState.COPY_FINISHED:
            for order in self.order.values():
                for start in [start for start, known in order.items() if known == of]:
                    del order[start]
        if after.state is SegmentState.DELETE_FINISHED:
            del self.segments[of]
            self.removed[of] = after
            while len(self.removed) > REMEMBERED:
                self.removed.popitem(last=False)

    def finish(self, of, term, offsets):
        key = of.partition, term
        order, highest = self.order.setdefault(key, {}), self.highest.get(key, -1)
        start, end = offsets.start, offsets.stop - 1
        if start <= end + 1:
            self.highest[key] = max(highest, end)
        if start > end:
            return
        while order and max(order) >= start and highest <= end:
            del order[max(order)]
        order[start] = of

    def kafka(self, partition, term, offset):
        """What Kafka answers."""
        order = self.order.get((partition, term), {})
        starts = [start for start in order if start <= offset]
        segment = self.segments[order[max(starts)]] if starts else None
        return segment if segment is not None and offset in stretch(segment, term) else None

    def holders(self, partition, term, offset):
        return [
            segment
            for segment in self.of(partition)
            if segment.state is SegmentState.COPY_FINISHED and offset in (stretch(segment, term) or ())
        ]

    def of(self, partition):
        return [segment for segment in self.segments.values() if segment.segment.partition == partition]

    def is_unreferenced(self, segment):
        if segment.state is not SegmentState.COPY_FINISHED:
            return True
        for term, _ in segment.terms:
            partition = segment.segment.partition
            shown = self.order.get((partition, term), {}).values()
            if segment.segment in shown:
                return False
            for offset in stretch(segment, term):
                if not any(offset in stretch(self.segments[of], term) for of in shown):
                    return False
        return True


# --- what may happen ---------------------------------------------------------------------------------------------


@st.composite
def adds(draw):
    start = draw(st.integers(0, 20))
    end = draw(st.integers(start, min(start + 8, 25)))
    numbers = sorted(draw(st.sets(st.sampled_from(TERMS), min_size=1, max_size=3)))
    low = draw(st.sampled_from([0, start, start, start]))
    starts = sorted(draw(st.lists(st.integers(low, end + 1), min_size=len(numbers), max_size=len(numbers))))
    if draw(st.integers(0, 3)):
        starts[0] = low
    return SegmentMetadata(
        segment=draw(ids),
        start=start,
        end=end,
        broker=draw(st.integers(0, 1)),
        max_timestamp=draw(st.integers(-1, 3)),
        event_timestamp=0,
        terms=tuple(zip(numbers, starts, strict=True)),
        size=draw(st.integers(0, 9)),
        custom_metadata=draw(customs),
        no_transaction_index=draw(st.booleans()),
    )


ids = st.builds(
    lambda at, number: SegmentId(PARTITIONS[at], UUID(int=number % 5 << 64 | number % 7)),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(0, 11),
)
customs = st.sampled_from([None, None, b"", b"x", b"longer"])
updates = st.builds(
    lambda segment, state, broker, custom: SegmentUpdate(
        segment=segment, broker=broker, event_timestamp=0, state=SegmentState(state), custom_metadata=custom
    ),
    ids,
    st.sampled_from([0, 1, 1, 1, 1, 2, 2, 3, 3]),
    st.sampled_from([0, 0, 1]),
    customs,
)
deletions = st.builds(
    lambda at, state, broker: PartitionDelete(
        partition=PARTITIONS[at], broker=broker, event_timestamp=0, state=PartitionDeleteState(state)
    ),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from([0, 0, 0, 1]),
)
finished = st.builds(lambda made: ("copied", made), adds())
steps = st.lists(
    st.one_of(adds(), finished, finished, updates, updates, updates, deletions, st.just("reload")), max_size=40
)


def told(events):
    """Some of the adds are followed by the end of their copy, so that there is something to be found."""
    for event in events:
        if isinstance(event, tuple):
            yield event[1]
            yield SegmentUpdate(segment=event[1].segment, broker=0, event_timestamp=0, state=SegmentState.COPY_FINISHED)
        else:
            yield event


def outcome(apply, event):
    try:
        return apply(event)
    except InvalidInput:
        return "refused"


def same_answers(cache, model):
    for partition in PARTITIONS:
        known = model.of(partition)
        listed = list(cache.segments(partition))
        assert sorted(listed, key=str) == sorted(known, key=str)
        assert [segment.start for segment in listed] == sorted(segment.start for segment in known)
        spare = list(cache.unreferenced(partition))
        assert sorted(spare, key=str) == sorted((s for s in known if model.is_unreferenced(s)), key=str)
        assert cache.deletion(partition) == model.deletions.get(partition)
        for segment in known:
            assert cache.get(segment.segment) == segment
        for term in TERMS:
            same_in_term(cache, model, partition, term)
        same_in_whichever_term(cache, model, partition)


def same_in_term(cache, model, partition, term):
    having = [segment for segment in model.of(partition) if stretch(segment, term) is not None]
    listed = list(cache.segments(partition, term))
    assert sorted(listed, key=str) == sorted(having, key=str)
    assert [segment.start for segment in listed] == sorted(segment.start for segment in having)
    assert cache.size(partition, term) == sum(segment.size for segment in having)
    highest = model.highest.get((partition, term), -1)
    assert cache.highest_offset(partition, term) == (None if highest < 0 else highest)
    for offset in OFFSETS:
        found, kafka = cache.segment_for(partition, term, offset), model.kafka(partition, term, offset)
        holders = model.holders(partition, term, offset)
        if kafka is not None:
            assert found == kafka
        elif holders:
            assert found in holders
        else:
            assert found is None


def read_on(cache, holding, at):
    """Up to where the segment that holds an offset is read: as long as nothing of a later term has what comes next."""
    segment, upto = holding[at], at
    while upto <= segment.end and segment.term_at(upto) >= holding_term(holding.get(upto), upto):
        upto += 1
    assert cache.end_of_reading(segment, at) == upto
    return upto


def holding_term(segment, offset):
    return -1 if segment is None else segment.term_at(offset)


def same_in_whichever_term(cache, model, partition):
    """What is asked without a term: as if each offset were looked up in each term, the highest first."""
    known = cache.terms(partition)
    assert known == sorted(set(known))
    assert {term for segment in model.of(partition) for term, _ in segment.terms} <= set(known) <= set(TERMS)
    holding = {}
    for offset in OFFSETS:
        found = [cache.segment_for(partition, term, offset) for term in reversed(TERMS)]
        holding[offset] = next((segment for segment in found if segment is not None), None)
        assert cache.holding(partition, offset) == holding[offset]
        assert (holding[offset] is not None) == any(model.holders(partition, term, offset) for term in TERMS)
    lowest = next((offset for offset in OFFSETS if holding[offset] is not None), None)
    assert cache.lowest(partition) == lowest
    expected, at = [], lowest
    while at is not None and holding.get(at) is not None:
        expected.append(holding[at])
        at = read_on(cache, holding, at)
    assert cache.readable(partition) == expected


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Small bounds, so that short histories reach them."""
    monkeypatch.setattr(cache_module, "_REMEMBERED", REMEMBERED)


@pytest.mark.parametrize(
    "few",
    [
        pytest.param(3, id="often put into columns"),
        pytest.param(1 << 16, id="beside the columns", marks=pytest.mark.matrix),
    ],
)
@settings(max_examples=examples(40), deadline=None)
@given(events=steps)
def test_random_histories_are_answered_as_by_a_plain_list(few, events):
    before, cache_rows._FEW = cache_rows._FEW, few
    try:
        check_history(events)
    finally:
        cache_rows._FEW = before


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=3000, deadline=None)
@given(events=steps, few=st.sampled_from([1, 3, 8, 1 << 16]))
def test_many_random_histories_are_answered_as_by_a_plain_list(few, events):
    before, cache_rows._FEW = cache_rows._FEW, few
    try:
        check_history(events)
    finally:
        cache_rows._FEW = before


@pytest.mark.parametrize("seed", some(range(40), 3))
def test_crowded_histories_are_answered_as_by_a_plain_list(seed):
    """Many segments over the same offsets of few terms, more being copied than removed."""
    chance = random.Random(seed)
    before, cache_rows._FEW = cache_rows._FEW, chance.choice([5, 1 << 16])
    try:
        check_history([crowded(chance) for _ in range(120)])
    finally:
        cache_rows._FEW = before


def crowded(chance):
    if chance.random() < 0.02:
        return "reload"
    segment = SegmentId(PARTITIONS[0], UUID(int=chance.randrange(40)))
    if chance.random() < 0.5:
        start = chance.randrange(24)
        end = chance.randrange(start, 26)
        terms = ((0, start),) if chance.random() < 0.6 else ((0, start), (1, chance.randint(start, end)))
        return (
            "copied",
            SegmentMetadata(
                segment=segment,
                start=start,
                end=end,
                broker=0,
                max_timestamp=0,
                event_timestamp=0,
                terms=terms,
                size=chance.randrange(9),
            ),
        )
    state = chance.choice([SegmentState.DELETE_STARTED, SegmentState.DELETE_FINISHED])
    return SegmentUpdate(segment=segment, broker=0, event_timestamp=0, state=state)


def test_a_sorted_map_of_starts_is_one():
    chance, starts, plain = random.Random(1), terms_module.Starts(array("q"), array("i")), {}
    for step in range(3000):
        start = chance.randrange(60)
        if chance.random() < (0.7 if step % 600 < 300 else 0.3):
            assert starts.put(start, step) == plain.get(start, terms_module.NONE)
            plain[start] = step
        elif start in plain:
            starts.remove(start)
            del plain[start]
        offset = chance.randrange(-1, 61)
        below, above = [at for at in plain if at <= offset], [at for at in plain if at > offset]
        assert starts.floor(offset) == (plain[max(below)] if below else terms_module.NONE)
        assert starts.above(offset) == (plain[min(above)] if above else terms_module.NONE)
        assert starts.first() == min(plain, default=terms_module.NONE)
        assert starts.last() == ((max(plain), plain[max(plain)]) if plain else (terms_module.NONE, terms_module.NONE))


def test_overlapping_ranges_are_found_by_rank():
    chance, index, plain = random.Random(2), terms_module.TermIndex(SegmentColumns()), {}
    for stretch in range(400):
        start = chance.choice([chance.randrange(60), 2**63 - 1 - chance.randrange(60)])
        end = chance.choice([min(start + chance.randrange(30), 2**63 - 1), 2**63 - 1])
        rank = (chance.randrange(2), start, -end, 0, stretch)
        index._overlaps[stretch] = rank, start, end
        plain[stretch] = rank
        if chance.random() < 0.6:
            gone = chance.choice(list(plain))
            del index._overlaps[gone], plain[gone]
        assert index.lowest() == min((rank[1] for rank in plain.values()), default=terms_module.NONE)
        for offset in (chance.randrange(90), 2**62, 2**63 - 1 - chance.randrange(60)):
            holding = [rank for rank in plain.values() if rank[1] <= offset <= -rank[2]]
            assert index.find(offset) == (max(holding)[-1] if holding else terms_module.NONE)


def check_history(events):
    cache, model = SegmentCache(), Model()
    for event in told(events):
        if event == "reload":
            tables = cache.to_tables()
            again = SegmentCache.from_tables(tables)
            assert answers(again) == answers(cache)
            assert again.to_tables() == tables
            cache = again
            continue
        checked = outcome(cache.check, event)
        applied = outcome(cache.apply, event)
        assert applied == outcome(model.apply, event)
        assert (checked == "refused") == (applied == "refused")
    same_answers(cache, model)
    again = SegmentCache.from_tables(cache.to_tables())
    same_answers(again, model)
    assert answers(again) == answers(cache)


def answers(cache):
    """Every lookup and list, in order: also where the model leaves a choice, a loaded cache makes the same."""
    return [
        (
            list(cache.segments(partition)),
            list(cache.unreferenced(partition)),
            [list(cache.segments(partition, term)) for term in TERMS],
            [cache.segment_for(partition, term, offset) for term in TERMS for offset in OFFSETS],
            [cache.holding(partition, offset) for offset in (-1, *OFFSETS)],
            cache.lowest(partition),
            cache.readable(partition),
        )
        for partition in PARTITIONS
    ]


def test_a_made_value_is_equal_to_one_that_was_checked():
    made = SegmentMetadata(
        segment=SegmentId(PARTITIONS[0], UUID(int=(1 << 128) - 1)),
        start=1,
        end=2**63 - 1,
        broker=-5,
        max_timestamp=-1,
        event_timestamp=-(2**63),
        terms=((0, 1), (2**31 - 1, 2**63 - 1)),
        size=2**31 - 1,
        custom_metadata=b"x",
        no_transaction_index=True,
    )
    cache = SegmentCache()
    cache.apply(made)
    for cached in (cache, SegmentCache.from_tables(cache.to_tables())):
        got = cached.get(made.segment)
        assert got == made
        assert hash(got) == hash(made)
        assert replace(got) == made
        assert repr(got) == repr(made)
