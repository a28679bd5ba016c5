"""Routes: which records of a log go into which tables."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strandline as sl
from strandline.errors import InvalidInput
from strandline.model.records import HEADERS
from strandline.tables.routes.route import UNROUTED, as_route, by, route
from strandline.tables.routes.split import ByConditions, ByLabel
from strandline.tables.rows.conditions import KeyLabel, where


def records(keys: list[bytes | None]) -> pa.Table:
    return pa.table(
        {
            "offset": pa.array(range(len(keys)), pa.int64()),
            "key": pa.chunked_array([pa.array(keys[:2], pa.binary()), pa.array(keys[2:], pa.binary())]),
            "value": pa.nulls(len(keys), pa.binary()),
            "headers": pa.nulls(len(keys), HEADERS),
        }
    )


KEYS = st.lists(st.sampled_from([b"a/1", b"b/2", b"../3", b"c", None, b"/4", b"\xff/5", b"a/", b"unknown/6"]))


@given(KEYS)
def test_a_rule_gives_each_record_to_the_table_of_its_label_in_order(keys):
    found = ByLabel(KeyLabel(b"/"), without=frozenset({"unknown"})).divide(records(keys))
    names = [None if key is None or b"/" not in key else key.partition(b"/")[0] for key in keys]
    expected = {name.decode(): [] for name in names if name in (b"a", b"b")}
    for offset, name in enumerate(names):
        if name in (b"a", b"b"):
            expected[name.decode()].append(offset)
    assert {name: rows["offset"].to_pylist() for name, rows in found.taken.items()} == expected
    assert found.is_taken.tolist() == [name in (b"a", b"b") for name in names]


@given(KEYS)
def test_a_list_gives_each_record_to_all_tables_that_take_it(keys):
    conditions = {
        "a": where(key_until=b"/", equals="a"),
        "again": where(key_until=b"/", equals="a"),
        "b": where(key_until=b"/", equals="b"),
        "prefix": where(key_prefix=b"a/1"),
    }
    found = ByConditions(conditions).divide(records(keys))
    for name, condition in conditions.items():
        expected = np.flatnonzero(condition.mask(records(keys)).to_numpy().astype(bool)).tolist()
        assert (found.taken[name]["offset"].to_pylist() if name in found.taken else []) == expected
    assert found.is_taken.tolist() == [key is not None and key[:2] in (b"a/", b"b/") for key in keys]


def test_a_table_without_a_condition_takes_all():
    found = ByConditions({"all": None, "a": where(key_prefix=b"a")}).divide(records([b"a", b"b", None]))
    assert found.taken["all"].num_rows == 3
    assert found.is_taken.all()


def test_a_rule_that_has_made_its_tables_makes_no_more():
    found = ByLabel(KeyLabel(b"/"), known=frozenset({"b"})).divide(records([b"a/1", b"b/1"]))
    assert list(found.taken) == ["b"]


def sink(path: str = "t", **options) -> sl.DeltaSink:
    return sl.DeltaSink(f"memory://routes/{path}", mode="append", **options)


def test_a_route_can_be_sent_to_workers():
    rest = sink("rest")
    found = route([sink("a").taking(where(key_prefix=b"a"))], unrouted=rest)
    (splitter, condition) = pickle.loads(pickle.dumps((found.splits.now, rest.takes)))
    assert splitter.divide(records([b"a", b"b"])).is_taken.tolist() == [True, False]
    assert condition.mask(records([b"a", b"b"])).to_pylist() == [False, True]
    assert found.sinks[UNROUTED] is rest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: route([]), "no table"),
        (lambda: route([sink("a"), sink("a")]), "twice"),
        (lambda: route([3]), "is none"),
        (lambda: route([sink("a")], unrouted="drop"), "'refuse' or 'skip'"),
        (lambda: route([sink("a")], unrouted=3), "'refuse' or 'skip'"),
        (lambda: route([sink("a")], unrouted=sink("a")), "one place"),
        (lambda: by(sink=sink), "either field, header or key_until"),
        (lambda: by(field="a", sink="s3://bucket/{name}"), "Callable"),
        (lambda: by(field="a", sink=sink, without="b"), "Collection"),
    ],
)
def test_a_route_that_cannot_be_meant_is_refused(given, message):
    with pytest.raises(InvalidInput, match=message):
        given()


def test_a_list_of_sinks_is_a_route_and_one_sink_is_none():
    assert as_route(sink("a")) is None
    assert list(as_route([sink("a"), sink("b")]).sinks) == ["a", "b"]


def test_tables_of_one_name_in_two_folders_keep_apart():
    assert list(as_route([sink("x/a"), sink("y/a")]).sinks) == ["a", "memory://routes/y/a"]


def test_the_sink_of_a_name_takes_only_its_records():
    rule = by(key_until=b"/", sink=sink).rule
    assert rule.sink("a").takes == where(key_until=b"/", equals="a")


def test_two_names_may_not_have_one_table():
    rule = by(key_until=b"/", sink=lambda _: sink("same")).rule
    rule.sink("a")
    with pytest.raises(InvalidInput, match="the names 'a' and 'b' the same table"):
        rule.sink("b")


@pytest.mark.parametrize("make", [lambda _: None, lambda name: {}[name], lambda _: 3])
def test_a_rule_without_a_sink_for_a_name_says_so(make):
    with pytest.raises(InvalidInput, match=r"for the name 'x'.*without a table"):
        by(field="f", sink=make).rule.sink("x")


def test_names_are_remembered_beside_the_tables_or_where_the_rule_says():
    assert by(field="f", sink=sink).rule.names_place() == ("memory://routes/_strandline_route", {})
    assert by(field="f", sink=sink, names="memory://n").rule.names_place() == ("memory://n", None)
    for odd in (lambda name: sink(f"{name}/x"), lambda _: sink("x"), lambda name: {"q": 1}[name]):
        with pytest.raises(InvalidInput, match="give the address of a folder for the names"):
            by(field="f", sink=odd).rule.names_place()
