"""How a command line becomes a function call, and what went wrong an exit code; knows no single command.

Exit codes: 0 only for success, 2 for a mistake in usage, configuration or input (one line on stderr), 1 for a failure
at run time, 130 after Ctrl-C, 141 when the reader of the output went away (training goes on without one). A SystemExit
of a command (143 after a SIGTERM) passes as it is. With RESFORMER_TRACEBACK=1 errors show their traceback.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import os
import re
import signal
import sys
import threading
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resformer.errors import RunError, UserError, did_you_mean

TRACEBACK_VARIABLE = "RESFORMER_TRACEBACK"

Text = typing.NewType("Text", str)
"""One text of a list whose flag takes one and may be repeated; `--flag=TEXT` takes a text that begins with a dash."""

Command = Callable[..., None]
"""A command has plain types, positional-only arguments for what is positional, and a docstring with an Args section
for its help.
"""


def run(commands: Mapping[str, Command], arguments: Sequence[str], *, program: str, about: str, version: str) -> int:
    """Run one command line and return the exit code. `commands` maps names of one or two words to functions."""
    interrupts: list[int] = []
    try:
        _check_texts(arguments)
        _printable()
        with _noting_interrupts(interrupts):
            _dispatch(commands, list(arguments), program=program, about=about, version=version)
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except UserError as error:
        return _report(program, str(error), code=2)
    except RunError as error:
        return _report(program, str(error), code=1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        where = f": {error.filename}" if error.filename else ""
        return _report(program, f"{error.strerror or error}{where}", code=2)
    except KeyboardInterrupt:
        return _report(program, "interrupted", code=130)
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        # A file system that cannot be written to is a matter of the place; a full one, or a broken one, of the moment.
        where = f": {error.filename}" if error.filename else ""
        return _report(program, f"{error.strerror or error}{where}", code=2 if error.errno == errno.EROFS else 1)
    except SystemExit as stop:
        # The table printer makes a SystemExit(1) of a broken pipe.
        if isinstance(stop.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except Exception as error:
        if interrupts:  # an import that Ctrl-C cut short can end in any error
            return _report(program, "interrupted", code=130)
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return _report(program, f"{message} (set {TRACEBACK_VARIABLE}=1 for the traceback)", code=1)


@contextlib.contextmanager
def _noting_interrupts(seen: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C as Python does, and note it, since libraries swallow some."""

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _in_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _report(program: str, message: str, *, code: int) -> int:
    if os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
        traceback.print_exc()
    with contextlib.suppress(OSError):  # nobody may be there to read it; the exit code stays true
        print(f"{program}: error: {message}", file=sys.stderr)
    return code


def _reader_gone() -> int:
    """The reader of our output is gone (`... | head`): point stdout elsewhere, or the interpreter complains once more
    at exit.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _check_texts(arguments: Sequence[str]) -> None:
    """Refuse arguments whose bytes are no text: nothing after us could write them down."""
    for number, argument in enumerate(arguments, start=1):
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"argument {number} is no UTF-8: {argument!a}; convert it") from None


def _printable() -> None:
    """Let an output that knows fewer characters than we print (an ASCII terminal) show the others as escapes."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _dispatch(commands: Mapping[str, Command], arguments: list[str], *, program: str, about: str, version: str) -> None:
    if arguments[:1] == ["--version"]:
        print(f"{program} {version}")
        return
    groups = {name.split()[0] for name in commands if " " in name}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview(commands, program=program, about=about))
        if not arguments:
            raise UserError(f"a command is missing; `{program} --help` lists them")
        return
    words = 1
    if arguments[0] in groups:
        if len(arguments) == 1 or arguments[1] in ("-h", "--help"):
            inside = {name: function for name, function in commands.items() if name.split()[0] == arguments[0]}
            print(_overview(inside, program=program, about=""))
            if len(arguments) == 1:
                raise UserError(
                    f"`{program} {arguments[0]}` needs one more word: {', '.join(n.split()[1] for n in inside)}"
                )
            return
        words = 2
    name, rest = " ".join(arguments[:words]), arguments[words:]
    if name not in commands:
        raise UserError(f"unknown command {name!r}{_hint(name, commands, program)}")
    positional, keywords = parse(commands[name], rest, program=f"{program} {name}")
    commands[name](*positional, **keywords)


def _overview(commands: Mapping[str, Command], *, program: str, about: str) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {program} COMMAND [...]", ""]
    lines += [about, ""] if about else []
    lines += [f"  {name:{width}}  {_summary(function)}" for name, function in commands.items()]
    lines += [
        "",
        f"`{program} COMMAND --help` shows a command's options with units and defaults,",
        f"`{program} --version` the version.",
    ]
    return "\n".join(lines)


def _summary(function: Command) -> str:
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")


def _hint(name: str, valid: Iterable[str], program: str) -> str:
    return did_you_mean(name, valid) or f"; `{program} --help` lists what there is"


def parse(function: Command, arguments: Sequence[str], *, program: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `arguments` give for `function`.

    Raises UserError with one line for anything that does not fit; SystemExit(0) after printing the help.
    """
    import tyro

    arguments = _checked_flags(function, list(arguments), program=program)

    collect = _collector(function)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            positional, keywords = tyro.cli(
                collect,
                prog=program,
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff,),
                registry=_plain_types(),
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(f"{_first_sentence(said.getvalue())}; see `{program} --help`") from None
    for name, value in zip(inspect.signature(function).parameters, positional, strict=False):
        if value == "":  # every positional text is a name or a place
            raise UserError(f"{name.upper()} of `{program}` is empty; see `{program} --help`")
    return positional, keywords


def _collector(function: Command) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A function with the signature and docstring of `function` that returns its arguments and does nothing else."""
    import tyro

    def collect(*positional: Any, **keywords: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return positional, keywords

    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:  # shown as RECIPE, not as TEXT
            shown = tyro.conf.arg(metavar=parameter.name.upper())
            hints[parameter.name] = typing.Annotated[hints[parameter.name], shown]
        elif parameter.name.endswith("_"):  # a Python keyword: import_ is --import
            named = tyro.conf.arg(name=parameter.name.removesuffix("_"))
            hints[parameter.name] = typing.Annotated[hints[parameter.name], named]
        elif _takes_texts(hints[parameter.name]):
            hints[parameter.name] = typing.Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    collect.__doc__, collect.__annotations__ = function.__doc__, hints
    collect.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]
    )
    return collect


def _takes_texts(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple and typing.get_args(hint)[0] is Text


def _first_sentence(box: str) -> str:
    """What a framed error message says before its first rule, in one line."""
    lines = [line.strip("\u2502| ").strip() for line in box.splitlines()]
    body: list[str] = []
    for line in lines[1:]:
        if line and not line.strip("\u2500\u2570\u256f+-"):
            if any(body):
                break
            continue  # without Unicode, a rule comes between the title and the text
        body.append(line)
    text = re.sub(r"^Error parsing ", "", " ".join(" ".join(body).split())).rstrip(".")
    return text or " ".join(box.split())


def _checked_flags(function: Command, arguments: list[str], *, program: str) -> list[str]:
    """Refuse unknown flags with the nearest valid one, and join repeated list flags (`--set a=1 --set b=2`), of which
    only the last would count. A list of paths takes one for each flag, so that `--import FILE.py RECIPE` can be typed.
    """
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    flags = {"--" + name.removesuffix("_").replace("_", "-"): name for name in keywords}
    lists = {
        flag
        for flag, name in flags.items()
        if typing.get_origin(hints[name]) is tuple and not _takes_texts(hints[name])
    }
    single = {flag for flag in lists if typing.get_args(hints[flags[flag]])[0] is Path}
    kept: list[str] = []
    joined: dict[str, list[str]] = {}
    open_list: str | None = None
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            flag, equals, value = argument.partition("=")
            flag = flag.replace("_", "-")
            if flag not in flags and flag != "--help":
                raise UserError(f"unknown option {flag} of `{program}`{_hint(flag, flags, program)}")
            open_list = flag if flag in lists else None
            if open_list:
                joined.setdefault(flag, []).extend([value] if equals else [])
                open_list = None if equals and flag in single else open_list
                continue
        if open_list:
            joined[open_list].append(argument)
            open_list = None if open_list in single else open_list
        else:
            kept.append(argument)
    for flag, values in joined.items():
        if not values:
            raise UserError(f"{flag} of `{program}` needs at least one value")
        if flag in single and "" in values:
            raise UserError(f"{flag}: expected a path, got an empty text; see `{program} --help`")
    return kept + [word for flag, values in joined.items() for word in (flag, *values)]


_KINDS: dict[type, tuple[str, str]] = {
    int: ("N", "a whole number"),
    float: ("X", "a number"),
    str: ("TEXT", "text"),
    Path: ("PATH", "a path"),
}


def _plain_types() -> Any:
    """Rules that name what was expected when a number does not parse, and show `N` where the parser would show
    `{None}|INT`.
    """
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def plain(info: Any) -> PrimitiveConstructorSpec[Any] | None:
        union = typing.get_origin(info.type) in (typing.Union, types.UnionType)
        kinds = [kind for kind in typing.get_args(info.type) if kind is not type(None)] if union else [info.type]
        if len(kinds) != 1 or kinds[0] not in _KINDS:
            return None
        kind = kinds[0]
        metavar, words = _KINDS[kind]

        def from_text(texts: list[str]) -> Any:
            if kind is Path and not texts[0]:  # Path("") would be the current directory
                raise ValueError("expected a path, got an empty text")
            try:
                return kind(texts[0])
            except ValueError:
                raise ValueError(f"expected {words}, got {texts[0]!r}") from None

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=from_text,
            is_instance=lambda value: value is None or isinstance(value, kind),
            str_from_instance=lambda value: ["none" if value is None else str(value)],
        )

    return registry
