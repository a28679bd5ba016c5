"""The logs of a server: opened and kept open, trimmed, and copied to their cold tiers, in rounds."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from strandline.errors import InvalidInput, NotReady, StrandlineError
from strandline.log.object.log import ObjectLog
from strandline.log.slots.slot_metrics import SlotMetrics
from strandline.log.wal.log import WalLog
from strandline.model.addresses import ParsedAddress
from strandline.model.retention import TIER_SLOT, as_retention, limits_of
from strandline.node.config import NodeConfig
from strandline.node.flight.security import ClientSecurity, ServerSecurity
from strandline.node.options import TierSettings
from strandline.node.running import RunningNode
from strandline.opening import open_url
from strandline.serve.config.settings import ColdSection, LogSection, NodeSection
from strandline.serve.config.values import Listen, revealed
from strandline.serve.log_state import log_state, measure_slots
from strandline.storage.env import Env
from strandline.tier.copy.tierer import Tierer
from strandline.tier.opening import attach, tiered, tiering
from strandline.tier.read.tiered_log import TieredLog, hot_log, hot_tier

_LOOK_EVERY: Final = 1.0
"""Seconds between two looks whether a write-ahead log or a node still works."""
_LONGEST_REST: Final = 600.0
"""Seconds after which also a log that has not grown has a round of its tierer: segments expire."""
_COMPACT_EVERY: Final = 3600.0
_LOGGER: Final = logging.getLogger("strandline.serve")


class Opening:
    """What opening takes beside the settings of a log: the secrets of the environment, and the machine."""

    def __init__(
        self,
        environment: Mapping[str, str],
        env: Env,
        *,
        server: ServerSecurity | None = None,
        client: ClientSecurity | None = None,
        flight: Listen | None = None,
    ) -> None:
        self.environment, self.env = environment, env
        self.server = ServerSecurity() if server is None else server
        self.client = ClientSecurity() if client is None else client
        self.flight = Listen("127.0.0.1:7450") if flight is None else flight

    def options(self, options: Mapping[str, Any]) -> dict[str, str] | None:
        """Options with their secrets; None for none."""
        return revealed(options, self.environment, self.env.disk) or None

    def open(
        self,
        address: str,
        options: Mapping[str, Any] | None = None,
        *,
        create: bool = False,
        content_type: str | None = None,
    ) -> Any:
        """The log at an address, with its cold tier."""
        security = self.client if ParsedAddress.of(address).is_node else None
        given = self.options(options or {})
        return open_url(
            address, create=create, content_type=content_type, options=given, security=security, env=self.env
        )


class ServedLog:
    """One log of the server: opened in rounds until that succeeds, and again after it failed."""

    def __init__(self, name: str, settings: LogSection, access: Opening) -> None:
        self.name, self.settings = name, settings
        self._access = access
        self._log: Any = None
        self._node: RunningNode | None = None
        self._why = "it is starting"
        self._is_pinned = False
        """Whether the tierer has had its slot."""
        self.current: Any = CurrentLog(self)
        """The log, for whoever keeps it while it is opened again."""

    @property
    def log(self) -> Any:
        """The log; ``NotReady`` with the reason while it is not open.

        That of a write-ahead log whose disk is full can be read until there is room, and refuses appends.
        """
        if self._log is None:
            raise NotReady(f"The log {self.name!r} is not open: {self._why}. Try again a little later.")
        return self._log

    @property
    def node(self) -> RunningNode | None:
        """The node that this log is the log of."""
        return self._node

    def take_cold_tier(self, given: ColdSection) -> Any:
        """Give the log the cold tier of the file, and read both tiers from now on; returns the log itself."""
        log, options = self.log, self._access.options(self.settings.options)
        hot = hot_log(log)
        attach(hot, given.store, given.events, options=options, env=self._access.env)
        if not isinstance(log, TieredLog) and self._log is log:  # or it was opened again meanwhile, with that tier
            self._log = tiered(hot, options=options, close_hot=True, env=self._access.env)
        return hot

    def trimmable(self) -> Any:
        """The log itself; ``NotReady`` while the cold tier of the file does not pin what is not copied yet."""
        hot = hot_tier(self.log)
        if self.settings.cold is not None and not self._is_pinned:
            self._is_pinned = any(slot.name == TIER_SLOT for slot in hot.slots.list())
            if not self._is_pinned:
                raise NotReady(
                    f"The log {self.name!r} is not trimmed before its cold tier has a slot, which pins what is not "
                    f"copied yet: see cold.{self.name}."
                )
        return hot

    def look(self, stop: threading.Event) -> float | None:
        """Open it if it is not open, or no longer works; returns when to look again."""
        del stop
        try:
            return self._looked()
        except Exception as error:
            self._why = str(error).rstrip(".")
            raise

    def _looked(self) -> float | None:
        if self.settings.node is not None:
            return self._look_at_node(self.settings.node)
        hot = hot_tier(self._log)
        if isinstance(hot, WalLog) and hot.failed:
            # Closed first, since it holds the lock. What is durable can be read of a closed log.
            with contextlib.suppress(StrandlineError):
                self._log.close()
            self._log = self._opened()
        elif self._log is None:
            self._log = self._opened()
        return _LOOK_EVERY if isinstance(hot_tier(self._log), WalLog) else None

    def _opened(self) -> Any:
        given = self.settings
        log = self._access.open(given.address, given.options, create=given.create, content_type=given.content_type)
        hot = hot_tier(log)
        if isinstance(hot, ObjectLog):
            apply_retention(hot, given)
        return log

    def _look_at_node(self, given: NodeSection) -> float:
        if self._node is not None and self._node.failure is not None:
            self._log, node, self._node = None, self._node, None
            with contextlib.suppress(StrandlineError):
                node.close()
        if self._node is None:
            self._node = RunningNode(self._node_config(given), env=self._access.env)
            others = [url for url in given.nodes.values() if url != self._node.url]
            self._log = open_url(_together([self._node.url, *others]), security=self._access.client)
        return _LOOK_EVERY

    def _node_config(self, given: NodeSection) -> NodeConfig:
        log, cold = self.settings, self.settings.cold
        policy = str(log.retention or "forever")
        tiers = TierSettings()
        if cold is not None:
            tiers = TierSettings(
                retention=str(cold.retention),
                target=int(cold.target),
                linger=float(cold.linger),
                pause=float(cold.every),
                events=cold.events,
            )
            if cold.store is None:
                raise InvalidInput(f"[logs.{self.name}.cold] needs a store: the nodes of a log share it.")
        idle = _plain(log.slot_idle)
        return NodeConfig(
            folder=log.address,
            name=given.name,
            listen=(given.listen or self._access.flight).place,
            url=given.url,
            lead=given.lead,
            create=log.create,
            content_type=log.content_type,
            upstream=given.upstream,
            lease=given.lease,
            lease_seconds=float(given.lease_seconds),
            automatic=given.automatic,
            policy=given.policy,
            nodes=given.nodes,
            region=given.region,
            retention=policy,
            limits=limits_of(as_retention(policy), _plain(log.slot_lag), idle),
            cold=None if cold is None else cold.store,
            tiering=tiers,
            server=self._access.server.on(self.name),
            client=self._access.client,
        )

    def close(self) -> None:
        """Make what was appended durable, and release it."""
        log, self._log, self._why = self._log, None, "the server is stopping"
        node, self._node = self._node, None
        with contextlib.ExitStack() as closing:
            if node is not None:
                closing.callback(node.close)
            if log is not None:
                closing.callback(log.close)


class CurrentLog:
    """A log of the server as it is opened now: what holds this need not know that it was opened again."""

    def __init__(self, served: ServedLog) -> None:
        self._served = served

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._served.log, name)

    def __repr__(self) -> str:
        return repr(self._served.log)


def _plain(number: float | None) -> int | None:
    return None if number is None else int(number)


def _together(urls: list[str]) -> str:
    """The address of a log by those of its nodes."""
    scheme = urls[0].partition("://")[0]
    return f"{scheme}://" + ",".join(url.partition("://")[2].rstrip("/") for url in urls)


def apply_retention(log: ObjectLog, given: LogSection) -> None:
    """Durably change what a log keeps if the file says another policy, or other limits of slots."""
    if given.retention is None and given.slot_lag is None and given.slot_idle is None:
        return
    identity = log.identity
    policy = identity.retention if given.retention is None else as_retention(str(given.retention))
    idle = _plain(given.slot_idle)
    limits = limits_of(policy, _plain(given.slot_lag), idle)
    if (policy, limits) != (identity.retention, log.slot_limits()):
        log.set_retention(policy, limits)
        _LOGGER.info("%s keeps %s from now on, as the file says.", log.url, policy)


class TrimRounds:
    """Trims one log, and measures its slots."""

    def __init__(self, served: ServedLog, given: LogSection, env: Env) -> None:
        self._served, self._given, self._env = served, given, env
        self._metrics: SlotMetrics | None = None

    def round(self, stop: threading.Event) -> float:
        """One trim."""
        del stop
        log, given = self._served.log, self._given
        hot = self._served.trimmable()
        if isinstance(hot, ObjectLog):
            hot.trim(grace=float(given.grace))
        elif isinstance(hot, WalLog):
            idle = _plain(given.slot_idle)
            policy = as_retention(str(given.retention or "forever"))
            hot.trim(policy, limits=limits_of(policy, _plain(given.slot_lag), idle))
        else:
            raise InvalidInput(f"The log {self._served.name!r} is a node's: its primary trims it. Leave out trim.")
        if self._metrics is None:
            self._metrics = SlotMetrics(str(log.url))
        measure_slots(self._metrics, log_state(log, self._env.clock.now()))
        return max(1.0, float(given.trim or 0))

    def close(self) -> None:
        """Remove its metrics."""
        if self._metrics is not None:
            self._metrics.end()


class TierRounds:
    """Keeps the cold tier of one log in step with it. It holds the tierer's slot until it is fenced or ends."""

    def __init__(self, served: ServedLog, given: ColdSection, folder: str | None, access: Opening) -> None:
        self._served, self._given, self._access = served, given, access
        self._folder = None if folder is None else f"{folder}/tiers/{quote(served.name, safe='')}"
        self._opened = contextlib.ExitStack()
        self._tierer: Tierer | None = None
        self._of: Any = None
        self._end: int | None = None
        self._last: float | None = None
        self._swept: float | None = None

    def round(self, stop: threading.Event) -> float:
        """One round, if there may be something to do."""
        log, given = self._served.log, self._given
        now, end = self._access.env.clock.monotonic(), log.bounds().next
        rest = min(float(given.linger), _LONGEST_REST)
        if self._last is None or end != self._end or now - self._last >= rest:
            self._round(log, stop, now)
            self._end, self._last = end, now
        return max(1.0, float(given.every))

    def _round(self, log: Any, stop: threading.Event, now: float) -> None:
        hot = hot_log(log)
        if self._tierer is None or self._of is not hot:  # a log that was opened again has another tierer
            self.close()
            self._of, self._tierer = hot, self._open(self._served.take_cold_tier(self._given))
        is_hour = self._swept is None or now - self._swept >= _COMPACT_EVERY
        try:
            self._tierer.run_once(sweep=is_hour, stop=stop)
            if is_hour and self._given.compact:
                self._tierer.compact(stop=stop)
        except StrandlineError as error:
            if not error.retryable:
                self.close()
            raise
        self._swept = now if is_hour else self._swept

    def _open(self, hot: Any) -> Tierer:
        given, options = self._given, self._access.options(self._served.settings.options)
        if self._folder is not None:
            self._access.env.disk.make_folders(self._folder)
        return self._opened.enter_context(
            tiering(
                hot,
                options=options,
                snapshot_dir=self._folder,
                background=False,
                target=int(given.target),
                linger=float(given.linger),
                retention=str(given.retention),
                env=self._access.env,
            )
        )

    def close(self) -> None:
        """Release the tierer."""
        self._tierer = self._of = None
        opened, self._opened = self._opened, contextlib.ExitStack()
        opened.close()
