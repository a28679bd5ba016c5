"""The commit watermark of a replica: what its readers see, and what it knows of the primary's."""

from __future__ import annotations

from typing import final

from strandline.node.node_folder import NodeFolder


@final
class ReplicaWatermark:
    """The watermark up to which the local records are known to be the primary's, and committed. Never decreases."""

    def __init__(self, node_folder: NodeFolder, committed: int, *, is_known: bool) -> None:
        """``committed`` is the last known watermark, ``is_known`` whether it covers all that this node has shown."""
        self._node_folder = node_folder
        self.committed = committed
        self.of_primary = committed
        """The primary's highest watermark; the copy may lack records below it, or have others."""
        self.is_known = is_known
        """Whether it covers everything that this node has shown; until then the node serves no reads."""
        self.compared: int | None = None
        """The offset of the last record until it is compared with the primary's."""

    @property
    def highest(self) -> int:
        """The highest watermark that is known of."""
        return max(self.of_primary, self.committed)

    def heard(self, committed: int) -> None:
        """The primary has this watermark."""
        self.of_primary = max(self.of_primary, committed)

    def raise_to(self, upto: int) -> None:
        """Raise it to the primary's, but not before the last record was compared."""
        if self.compared is None and upto > self.committed:
            self._mark_unsettled()
            self.committed = upto

    def rebuilt(self) -> None:
        """Every record is the primary's from now on: the highest known watermark applies here."""
        self._mark_unsettled()
        self.committed = self.highest

    def learn(self, committed: int, term_start: int) -> None:
        """A watermark past the start of its term covers everything ever committed, and so all records shown here."""
        if committed >= term_start and self.compared is None:
            self.is_known = True

    def _mark_unsettled(self) -> None:
        """Store, before readers see more than the stored watermark, that it may be too low."""
        if self._node_folder.state.settled:
            self._node_folder.remember(settled=False)
