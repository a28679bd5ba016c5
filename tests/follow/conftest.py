"""Fixtures of this folder."""

import os

import pytest


@pytest.fixture
def unsynced(monkeypatch):
    """Do not sync files: for tests in which many processes die, but not the machine."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
