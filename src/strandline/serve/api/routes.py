"""Requests to ``/v1/…``: which there are, what each needs to be allowed, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, final

import msgspec

from strandline.errors import AlreadyExists, InvalidInput, NotFound, StrandlineError
from strandline.model.addresses import is_plain_name
from strandline.serve.api.permissions import Permissions
from strandline.serve.api.state import (
    ActRequest,
    MoveRequest,
    PromoteRequest,
    RebuildRequest,
    RetentionRequest,
    ServerState,
    SlotRequest,
)
from strandline.serve.config.changes import PartName
from strandline.serve.http.access import Access
from strandline.serve.http.answers import HttpAnswer, problem, problem_of
from strandline.serve.http.calls import Calls
from strandline.serve.http.requests import Request

Sees = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class StateRoute:
    """A request: its method and path, what it needs, and what answers it."""

    method: str
    path: str
    """Names in braces stand for one part of the path, such as ``{log}``, ``{slot}``, ``{table}``, ``{verb}``."""
    access: Access
    summary: str
    answer: Callable[[ServerState, Mapping[str, str], Any, Sees], dict[str, Any]]
    body: type[msgspec.Struct] | None = None


ROUTES: Final = (
    StateRoute("GET", "/v1/logs", Access.READ, "All logs.", lambda state, _p, _b, sees: state.logs(sees)),
    StateRoute(
        "GET", "/v1/logs/{log}", Access.READ, "A log with its slots.",
        lambda state, p, _b, _s: state.log(p["log"]),
    ),
    StateRoute(
        "GET", "/v1/logs/{log}/segments", Access.READ, "The segments of a log's cold tier.",
        lambda state, p, _b, _s: state.segments(p["log"]),
    ),
    StateRoute(
        "GET", "/v1/logs/{log}/nodes", Access.READ, "The nodes of a replicated log.",
        lambda state, p, _b, _s: state.nodes(p["log"]),
    ),
    StateRoute("GET", "/v1/parts", Access.READ, "All parts.", lambda state, _p, _b, sees: state.parts(sees)),
    StateRoute(
        "GET", "/v1/tables", Access.READ, "All tables.",
        lambda state, _p, _b, sees: state.parts(sees, "tables"),
    ),
    StateRoute(
        "GET", "/v1/tables/{table}/letters", Access.READ, "The dead letters of a table, by reason.",
        lambda state, p, _b, _s: state.letters(p["table"]),
    ),
    StateRoute(
        "GET", "/v1/ingest", Access.READ, "All ingests.",
        lambda state, _p, _b, sees: state.parts(sees, "ingest"),
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/slots", Access.CONSUME, "Create a slot.",
        lambda state, p, body, _s: state.create_slot(p["log"], body), SlotRequest,
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/slots/{slot}/reset", Access.CONSUME, "Move a slot.",
        lambda state, p, body, _s: state.reset_slot(p["log"], p["slot"], body), MoveRequest,
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/slots/{slot}/drop", Access.CONSUME, "Remove a slot.",
        lambda state, p, body, _s: state.drop_slot(p["log"], p["slot"], body), ActRequest,
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/trim", Access.ADMIN, "Trim a log now.",
        lambda state, p, body, _s: state.trim(p["log"], body), ActRequest,
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/retention", Access.ADMIN, "Change what a log keeps.",
        lambda state, p, body, _s: state.retain(p["log"], body), RetentionRequest,
    ),
    StateRoute(
        "POST", "/v1/logs/{log}/promote", Access.ADMIN, "Make the node of this process the primary.",
        lambda state, p, body, _s: state.promote(p["log"], body), PromoteRequest,
    ),
    StateRoute(
        "POST", "/v1/tables/{table}/replay", Access.ADMIN, "Apply the dead letters of a table.",
        lambda state, p, body, _s: state.replay(p["table"], body), ActRequest,
    ),
    StateRoute(
        "POST", "/v1/tables/{table}/rebuild", Access.ADMIN, "Build a table again from its log.",
        lambda state, p, body, _s: state.rebuild(p["table"], body), RebuildRequest,
    ),
    StateRoute(
        "POST", "/v1/parts/{section}/{name}/{verb}", Access.ADMIN, "Pause or resume a part.",
        lambda state, p, body, _s: state.switch(PartName(p["section"], p["name"]), p["verb"], body), ActRequest,
    ),
)  # fmt: skip

_VERBS: Final = ("pause", "resume")
_MOST_BODY: Final = 64 << 10


def matched(path: str) -> list[tuple[StateRoute, dict[str, str]]]:
    """The routes of a path, with the names in it.

    >>> [(route.method, names) for route, names in matched("/v1/logs/a")]
    [('GET', {'log': 'a'})]
    """
    given = path.split("/")
    found = []
    for route in ROUTES:
        wanted = route.path.split("/")
        names = {}
        if len(wanted) != len(given):
            continue
        for part, name in zip(wanted, given, strict=True):
            if part.startswith("{"):
                names[part[1:-1]] = name
            elif part != name:
                break
        else:
            if names.get("verb", _VERBS[0]) in _VERBS and all(map(is_plain_name, names.values())):
                found.append((route, names))
    return found


@final
class StateApi:
    """Answers requests to ``/v1/…``."""

    def __init__(self, state: ServerState, permissions: Permissions, calls: Calls) -> None:
        self._state, self._permissions, self._calls = state, permissions, calls

    async def answer(self, request: Request, body: bytes) -> HttpAnswer:
        """The answer: JSON, or a problem document."""
        found = matched(request.path)
        if not found:
            return problem(HTTPStatus.NOT_FOUND, "There is nothing here: see /v1/logs and /v1/parts.")
        taken = [(route, names) for route, names in found if route.method == request.method.replace("HEAD", "GET")]
        if not taken:
            allowed = ", ".join(sorted({route.method for route, _ in found}))
            return problem(HTTPStatus.METHOD_NOT_ALLOWED, f"Use {allowed} here.", {"Allow": allowed})
        route, names = taken[0]
        try:
            return await self._answer(route, names, request, body)
        except NotFound as error:
            return problem(HTTPStatus.NOT_FOUND, str(error))
        except AlreadyExists as error:
            return problem(HTTPStatus.CONFLICT, str(error))
        except StrandlineError as error:
            return problem_of(error)

    async def _answer(self, route: StateRoute, names: Mapping[str, str], request: Request, body: bytes) -> HttpAnswer:
        denied = self._permissions.denied_all(request.headers)
        asked = None if denied is not None else _decoded(route, body)
        if denied is None and (names or route.access is not Access.READ):  # a list is of what the caller may see
            slot: str = names.get("slot") or getattr(asked, "name", "") or ""
            log = self._state.log_in(names)
            denied = self._permissions.denied(request.headers, route.access, log=log, slot=slot)
        if denied is not None:
            return denied.answer()
        sees = lambda log: self._permissions.sees(request.headers, log)  # noqa: E731
        done = await self._calls(route.answer, self._state, names, asked, sees)
        return HttpAnswer(
            HTTPStatus.OK, {"Content-Type": "application/json", "Cache-Control": "no-store"}, msgspec.json.encode(done)
        )


def _decoded(route: StateRoute, body: bytes) -> Any:
    if route.body is None:
        return None
    try:
        return msgspec.json.decode(body or b"{}", type=route.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"The body is no {route.body.__name__}: {error}.") from error
