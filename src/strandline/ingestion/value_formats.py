"""Value formats of a copy: what a typed source names is recorded in its target."""

from __future__ import annotations

import logging
from typing import Any, Final

from strandline.errors import CorruptData, MissingExtra, UnsupportedVersion
from strandline.log.read.value_format import named_versions
from strandline.values.recorded import check_copied, codec_of

_LOGGER: Final = logging.getLogger(__name__)


def match_formats(source: Any, target: Any) -> None:
    """Record the source's value format in a target that has nothing yet, or that has an older version of it.

    ``SchemaRefused`` if the target names a format that does not decode the source's values. A log of plain bytes that
    has records stays one, and so does a log without a place for a format.
    """
    given, known = named_versions(source), named_versions(target)
    is_older = len(known) < len(given) and all(map(lambda ours, theirs: ours.is_same_format(theirs), known, given))
    evolve = getattr(target, "evolve_value", None) if is_older and (known or target.end().next == 0) else None
    if evolve is not None:
        try:
            codecs = [codec_of(version, "the source") for version in given[len(known) :]]
        except (UnsupportedVersion, CorruptData, MissingExtra) as error:
            _LOGGER.warning("The target %r does not get the value format of its source: %s", target, error)
            codecs = []
        for codec in codecs:
            evolve(codec)
    check_copied(given, named_versions(target), f"The target {target!r}")
