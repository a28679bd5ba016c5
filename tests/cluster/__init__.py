"""A cluster of simulated machines that runs the nodes of production, and a checker over what happens in it.

:class:`World` plays the history of a seed; :class:`Checker` is the judge of it, and knows nothing but events.
"""

from tests.cluster.faults import Climate
from tests.cluster.history import Broken, Checker, check
from tests.cluster.simulated_cluster import RunSummary, World, play

__all__ = ["Broken", "Checker", "Climate", "RunSummary", "World", "check", "play"]
