"""Command classes that write usage lines, and explain unknown subcommands, unknown options and invalid numbers."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from farandole._extras import NEEDED_BY_COMMAND, require
from farandole.cli.parameters import parameters_of


class CommandGroup(TyperGroup):
    """A command group that suggests similar names for an unknown subcommand."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes | {"suggest_commands": False})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the subcommand in `args`; if it is unknown, add a suggestion to the error."""
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if type(error).__name__ == "UsageError" and (names := nearest(args[0], self.commands)):
                suggestion = " or ".join(map(repr, names))
                error.message = f"{error.message.rstrip('.')}. Did you mean {suggestion}?"  # type: ignore[attr-defined]
            raise


def nearest(name: str, known: Collection[str]) -> list[str]:
    """Return up to two names in `known` that are similar to `name`, the most similar first.

    The second name is returned only if it is almost as similar as the first.
    """
    found = difflib.get_close_matches(name, known, 2)
    ratios = [difflib.SequenceMatcher(None, each, name).ratio() for each in found]
    return [each for each, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]


class Command(TyperCommand):
    """A subcommand that explains invalid arguments, and checks that the required modules are installed.

    Help texts show the placeholders from `parameters.py`, such as N, unless a parameter specifies its `metavar`.
    """

    elsewhere: Mapping[str, str] = {}
    """Maps unsupported options of other launchers to the alternatives that the error message suggests."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._parameters = {} if self.callback is None else parameters_of(self.callback)
        for param in self.params:
            if param.metavar is None and param.name in self._parameters:
                param.metavar = self._parameters[param.name].placeholder

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; if an option is unknown or a number is invalid, explain the error."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            kind: Any = type(error).__name__
            if kind == "NoSuchOption" and (name := getattr(error, "option_name", None)) is not None:
                error.message, error.possibilities = self._answer(name), None  # type: ignore[attr-defined]
            elif kind == "BadParameter":
                self._explain_number(error, ctx, words)
            raise

    def _explain_number(self, error: Any, ctx: Any, args: list[str]) -> None:
        """Add the valid range, and the option as the user spelled it, to an error about an invalid number."""
        parameter = self._parameters.get(getattr(error.param, "name", ""))
        if parameter is None or parameter.kind not in (int, float):
            return
        values, _, _ = self.make_parser(ctx).parse_args(list(args))
        given = values.get(parameter.name)
        for text in given if isinstance(given, list | tuple) else [given]:
            if isinstance(text, str) and not parameter.is_valid_number(text):
                spelled = [word.partition("=")[0].replace("_", "-") for word in args]
                names = [name for name in spelled if name in error.param.opts]
                error.param_hint = (names or error.param.opts)[0]
                error.message = f"expected {parameter.expected}, got {text!r}"
                return

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, with optional arguments in brackets."""
        pieces = [self.options_metavar] if self.options_metavar else []
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = str(param.metavar)
                pieces.append((name if param.required else f"[{name}]") + ("" if param.nargs == 1 else "..."))
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the descriptions of the arguments and options."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                name = str(param.metavar) if param.param_type_name == "argument" else record[0]
                rows[param.param_type_name].append((name, record[1]))
        for kind, described in rows.items():
            if described:
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(described)

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        If a module from an extra is missing, raise ModuleNotFoundError before any slow import.
        """
        require(NEEDED_BY_COMMAND.get(self.name or "", ()))
        return super().invoke(ctx)

    def _answer(self, name: str) -> str:
        name = name.replace("_", "-")
        if name in self.elsewhere:
            return f"{name} is not supported: {self.elsewhere[name]}"
        options = [option for param in self.params for option in (*param.opts, *param.secondary_opts)]
        names = nearest(name, [option for option in options if option.startswith("-")])
        return f"unknown option {name}" + (f"; did you mean {' or '.join(names)}?" if names else "")


def with_value(args: Sequence[str], option: str, known: Collection[str], default: str) -> list[str]:
    """Return `args` with `default` inserted after `option` if no value follows the option.

    The next argument is a value if it is equal or similar to a name in `known`.
    """
    found: list[str] = []
    for number, argument in enumerate(args):
        found.append(argument)
        if argument == option and not nearest("".join(args[number + 1 : number + 2]), known):
            found.append(default)
    return found


class KeysCommand(Command):
    """A subcommand whose arguments include KEY=VALUE.

    The error for an unknown option may suggest a configuration key.
    """

    def _answer(self, name: str) -> str:
        from farandole.train.config import known_keys, unknown_key

        answer, key = super()._answer(name), name.lstrip("-").replace("-", "_")
        if key in known_keys():
            return f"unknown option {name}; {key} is a configuration key: use {key}=VALUE"
        if "; " in answer:
            return answer
        return f"{answer}; to set a configuration key, use KEY=VALUE: {unknown_key(key).partition('; ')[2]}"
