"""Commands and groups of commands: they take the options of the program, and their help names no types of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from strandline.cli.shared.options import OF_EVERY, OF_NODES, add, for_nodes

F = TypeVar("F", bound=Callable[..., Any])

MARKUP: Final = "markdown"
_HELP: Final = "strandline.help"
_FEW: Final = 10
_MARKS: Final = "/:."


class _OfProgram:
    """Takes the options of the program wherever it takes its own, which win where a flag is the same."""

    connects = True
    """Whether it takes those that connect to a node."""
    epilog: str | None

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments; in help only its own."""
        own = [_without_type(param) for param in super().get_params(ctx)]  # type: ignore[misc]
        return own if _HELP in ctx.meta else [*self._of_program(ctx), *own]

    def _of_program(self, ctx: Any) -> list[Any]:
        names = (*OF_EVERY, *OF_NODES) if self.connects else OF_EVERY
        return [] if ctx.parent is None else [one for one in ctx.find_root().command.params if one.name in names]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and note the options of the program."""
        rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        add({option.name: ctx.params.pop(option.name) for option in self._of_program(ctx)})
        if not self.connects and (given := for_nodes()):
            ctx.fail(f"{', '.join(given)} is for commands that connect to a node, which {ctx.command_path} does not.")
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, which ends with the names of the options of the program."""
        if ctx.parent is not None:
            ctx.meta[_HELP] = True
            shared = "--json, --debug and, for a node's address, --token, --ca, --cert, --cert-key"
            taken = shared if self.connects else "--json and --debug"
            self.epilog = f"Every command also takes {taken}: see strandline --help."
        super().format_help(ctx, formatter)  # type: ignore[misc]


class CommandGroup(_OfProgram, TyperGroup):
    """A group whose commands take an address. An address where a command belongs is an error that says what to type."""

    for_address: ClassVar[str | None] = None
    """The command that an address without a command means."""

    @property
    def connects(self) -> bool:  # type: ignore[override]
        """Whether a command of the group does."""
        return any(getattr(command, "connects", True) for command in self.commands.values())

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, or leave out."""
        if args and self._is_address(args[0]):
            if self.for_address is not None:
                return super().resolve_command(ctx, [self.for_address, *args])
            path, names = ctx.command_path, ", ".join(self.commands)
            known = f"Commands are {names}." if len(self.commands) <= _FEW else f"{path} -h lists the commands."
            ctx.fail(f"{args[0]!r} is no command: write {path} COMMAND {args[0]}. {known}")
        return super().resolve_command(ctx, args)

    def _is_address(self, word: str) -> bool:
        return (
            word not in self.commands and bool(word) and (any(mark in word for mark in _MARKS) or Path(word).exists())
        )


class ListingGroup(CommandGroup):
    """A group in which an address alone is listed: ``strandline slots URL`` is ``strandline slots list URL``."""

    for_address = "list"


class Command(_OfProgram, TyperCommand):
    """A command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an error does not name the library that found it."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise

    @property
    def connects(self) -> bool:  # type: ignore[override]
        """As :func:`~strandline.cli.shared.common.guarded` was told."""
        return getattr(self.callback, "connects", False)


class Commands(typer.Typer):
    """An application whose commands are of our class."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[F], F]:
        """Add a command."""
        return super().command(name, cls=cls or Command, **options)


def group(text: str, *, cls: type[CommandGroup] = CommandGroup) -> Commands:
    """A group without commands; the first paragraph of ``text`` is its help in the list of groups."""
    return Commands(cls=cls, no_args_is_help=True, help=text, rich_markup_mode=MARKUP)


def _without_type(param: Any) -> Any:
    """The parameter, whose help shows the name of its value and no type: Typer shows ``<bool>`` for a flag."""
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
        several = "..." if param.nargs != 1 and "..." not in name else ""
        usage = f"{name}{several}" if param.required else f"[{name}]{several}"
        param.display_type_rich = lambda ctx: None  # noqa: ARG005 - called with this name
        param.get_usage_pieces = lambda ctx: [usage]  # noqa: ARG005
    elif param.is_flag:
        param.metavar = ""
    return param
