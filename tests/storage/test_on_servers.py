"""The store and the cell contract on real servers, over the wire, as users open them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strandline.storage.objects.store import ObjectStore
from strandline.testing.stores import ObjectStoreContract
from tests.storage.cell_contract import CellContract


class TestStoreOnS3(ObjectStoreContract):
    nests = False  # this server keeps objects in a file system; Amazon's has no such limit
    increments = 400
    many = 1100  # more than one of the server's pages

    @pytest.fixture
    def store(self, s3_place: Callable[[], ObjectStore]) -> ObjectStore:
        return s3_place()


class TestStoreOnAzure(ObjectStoreContract):
    increments = 200
    many = 1100
    names = tuple(name for name in ObjectStoreContract.names if "\\" not in name)  # Azure takes a backslash for a slash

    @pytest.fixture
    def store(self, azure_place: Callable[[], ObjectStore]) -> ObjectStore:
        return azure_place()


class TestCellOnS3(CellContract):
    increments = 50

    @pytest.fixture
    def store(self, s3_place: Callable[[], ObjectStore]) -> ObjectStore:
        return s3_place()


@pytest.mark.matrix
class TestCellOnAzure(CellContract):
    increments = 25

    @pytest.fixture
    def store(self, azure_place: Callable[[], ObjectStore]) -> ObjectStore:
        return azure_place()
