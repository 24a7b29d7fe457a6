"""Writes `docs/cli.md` from the commands themselves: their help texts, arguments and options.

    python scripts/cli_docs.py           writes docs/cli.md
    python scripts/cli_docs.py --check   exit code 1 when it is not up to date

Made from the parameters and not from the rendered help, whose look depends on the version of typer.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from orlop.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# Command line

`orlop` sees, checks, compares, converts and drills checkpoints: orlop's own, and any directory that
`torch.distributed.checkpoint` wrote. It never executes what is in them. `ls`, `inspect`, `verify` and `prune` start
without torch. Every command takes `--json`; progress bars appear on a terminal only; `orlop --install-completion` sets
up the shell.

| exit code | means |
| --- | --- |
| 0 | fine |
| 1 | findings: damaged, different, not identical; nothing that matches |
| 2 | wrong usage |
| 3 | can't read (or write) what was asked for, or a drill could not be carried out |
| 130, 143 | ended by Ctrl-C, by SIGTERM; nothing half-written is left |
| 141 | what read the output went away, as `head` does |

An error is one message on stderr: what and where in its first line, then what was found and what to do; with
`--json` as well, and stdout is empty then. Only `inspect --json` still gives all that it could read, and says under
`unread` which leaves of param groups it could not, and why. Names are shown without their control characters;
`NO_COLOR` is honoured. Where a checkpoint is meant and a run's directory is given, `inspect` takes the newest one and
says so, `verify` takes all, and the others say which steps there are.

This page is made of the commands' own help by `scripts/cli_docs.py`.
"""


def render() -> str:
    """The page."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(_command(name, command) for name, command in commands.items())])


def _command(name: str, command: Any) -> str:
    shown = [parameter for parameter in command.params if "--help" not in parameter.opts]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option"]
    usage = " ".join(["orlop", name, *command.collect_usage_pieces(None)])
    lines = [f"## `orlop {name}`", "", "```text", usage, "```", "", *_help(command.help), ""]
    rows = [(_placeholder(each), each.help) for each in arguments]
    rows += [(", ".join(each.opts + each.secondary_opts), _with_default(each)) for each in options]
    lines += ["| | |", "| --- | --- |", *(f"| `{names}` | {text} |" for names, text in rows), ""]
    return "\n".join(lines)


def _placeholder(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _with_default(option: Any) -> str:
    text = option.help.rstrip(".")
    default = option.default
    if option.is_flag or callable(default) or default in (None, "", [], ()):
        return f"{text}."
    return f"{text} (default: {default})."


def _help(text: str) -> list[str]:
    """The help's paragraphs; its examples become code."""
    lines: list[str] = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):
            _, title, *rest = paragraph.split("\n")
            lines += [title, "", "```console", *(f"$ {line.strip()}" for line in rest), "```", ""]
        else:
            lines += [*paragraph.split("\n"), ""]
    return lines[:-1]


def main() -> int:
    """Write or check."""
    page = render()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == page else 1
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
