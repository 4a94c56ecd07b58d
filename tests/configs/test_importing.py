"""Imports without a search for garbage in what they make."""

from __future__ import annotations

import gc

import pytest

from configs.machine import without_collection


def failing_import(seen: list[bool]) -> None:
    seen.append(gc.isenabled())
    raise ImportError("gone")


def test_no_garbage_is_looked_for_during_an_import_and_again_after_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: seen.append(gc.isenabled()))

    with pytest.raises(ImportError, match="gone"), without_collection():
        failing_import(seen)

    assert seen == [False, False]  # at the import, and when what it made is set apart
    assert gc.isenabled()
