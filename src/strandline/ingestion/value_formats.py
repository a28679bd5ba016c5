"""Value formats of a copy: what a typed source names is recorded in its target."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

from strandline.errors import CorruptData, MissingExtra, UnsupportedVersion
from strandline.formats.json.value_versions import ValueVersion
from strandline.log.read.value_format import named_versions
from strandline.values.recorded import check_copied, codec_of

_LOGGER: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class FormatFollower:
    """Keeps the value format of a copy at that of its source."""

    source: Any
    target: Any
    _known: tuple[ValueVersion, ...] | None = None
    """The versions of the source that the target has; None before the first look, which all sources get."""

    def match(self) -> None:
        """Record what is new in the source in a target that has nothing yet, or an older version of the same format.

        Called after records were read and before they are appended: then the target names the version of each of its
        records. A log of plain bytes is not asked again; as a target that has records it stays one, and so does a log
        without a place for a format. ``SchemaRefused`` if the target names a format that does not decode the values.
        """
        if self._known == ():
            return
        given = named_versions(self.source)
        if given == self._known:
            return
        known = named_versions(self.target)
        is_older = len(known) < len(given) and all(map(lambda ours, theirs: ours.is_same_format(theirs), known, given))
        evolve = getattr(self.target, "evolve_value", None)
        if is_older and evolve is not None and (known or self.target.end().next == 0):
            try:
                codecs = [codec_of(version, "the source") for version in given[len(known) :]]
            except (UnsupportedVersion, CorruptData, MissingExtra) as error:
                _LOGGER.warning("The target %r does not get the value format of its source: %s", self.target, error)
                codecs = []
            for codec in codecs:
                evolve(codec)
        check_copied(given, named_versions(self.target), f"The target {self.target!r}")
        self._known = given
