"""Groups of commands: an address in the place of a command, and help that names no types of Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])

MARKUP: Final = "markdown"
_FEW: Final = 10
_MARKS: Final = "/:."


class CommandGroup(TyperGroup):
    """A group whose commands take an address. An address where a command belongs is an error that says what to type."""

    for_address: ClassVar[str | None] = None
    """The command that an address without a command means."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command that is left out."""
        word = next((word for word in args if not word.startswith("-")), "")
        if self.for_address is not None and self._is_address(word):
            args = [self.for_address, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name."""
        if args and self._is_address(args[0]):
            few = len(self.commands) <= _FEW
            known = f"Commands are {', '.join(self.commands)}." if few else f"{ctx.command_path} -h lists the commands."
            ctx.fail(f"{args[0]!r} is no command: write {ctx.command_path} COMMAND {args[0]}. {known}")
        return super().resolve_command(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """The options."""
        return [_without_type(param) for param in super().get_params(ctx)]

    def _is_address(self, word: str) -> bool:
        return (
            word not in self.commands and bool(word) and (any(mark in word for mark in _MARKS) or Path(word).exists())
        )


class ListingGroup(CommandGroup):
    """A group in which an address alone is listed: ``strandline slots URL`` is ``strandline slots list URL``."""

    for_address = "list"


class Command(TyperCommand):
    """A command. It takes the shared options, too, which its help only names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an error does not name the library that found it."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """The options and arguments."""
        return [_without_type(param) for param in super().get_params(ctx)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, which ends with the names of the shared options."""
        names = ", ".join(param.opts[0] for param in self.params if getattr(param, "hidden", False))
        self.epilog = f"Options of every command: {names}; see strandline -h."
        super().format_help(ctx, formatter)


class Commands(typer.Typer):
    """An application whose commands are of our class."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **options: Any
    ) -> Callable[[F], F]:
        """Add a command."""
        return super().command(name, cls=cls or Command, **options)


def group(text: str, *, short: str | None = None, cls: type[CommandGroup] = CommandGroup) -> Commands:
    """A group without commands; ``short`` is its help in the list of groups."""
    return Commands(cls=cls, no_args_is_help=True, help=text, short_help=short, rich_markup_mode=MARKUP)


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
