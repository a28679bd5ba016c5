"""Fixtures of this folder."""

import os

import pytest


@pytest.fixture
def unsynced(monkeypatch):
    """Files are not synced: for tests in which many processes die, and the power stays on."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
