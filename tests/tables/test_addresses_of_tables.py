"""Addresses and names that are no table's: one sentence, and no error of a library."""

from __future__ import annotations

import pytest

import strandline as sl
from strandline.errors import InvalidInput
from strandline.log.memory import MemoryLog
from tests.cli.conftest import Run, run  # noqa: F401 - a fixture
from tests.tables.maintain.test_maintenance_formats import Iceberg, extend


@pytest.mark.parametrize("address", ["mysql://host/shop#orders", "http://host/orders", "memory://orders"])
def test_an_address_with_an_unknown_scheme_is_refused(address):
    log = MemoryLog()
    extend(log, 1)
    with pytest.raises(InvalidInput, match="no address of a table"):
        sl.follow(log, sl.DeltaSink(address), upto="end")


def test_a_folder_on_another_host_is_refused():
    with pytest.raises(InvalidInput, match="names the host elsewhere"):
        sl.DeltaSink("file://elsewhere/orders")


def test_commands_refuse_an_unknown_scheme_in_one_sentence(run: Run, tmp_path):  # noqa: F811
    sl.open(f"{tmp_path}/log", create=True).close()
    for command in (["follow", f"{tmp_path}/log", "mysql://host/shop#orders"], ["table", "describe", "mysql://host/x"]):
        result = run(*command)
        assert result.exit_code == 1
        assert "is no address of a table" in result.stderr
        assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["shop.or\0ders", "sh\0op.orders", "shop.a\nb"])
def test_a_control_character_in_the_name_of_an_iceberg_table_is_refused(tmp_path, name):
    place = Iceberg(tmp_path)
    for options in ({"table": name}, {"table": "shop.orders", "dead_letters": name}):
        with pytest.raises(InvalidInput, match="control characters"):
            sl.IcebergSink(place.catalog, **options)
    place.close()
