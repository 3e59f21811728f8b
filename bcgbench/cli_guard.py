"""How a command ends: its errors as one message on stderr, its result as an exit code."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from typing import TYPE_CHECKING

import typer

from bcgbench.errors import BcgbenchError

if TYPE_CHECKING:
    from collections.abc import Callable

INTERRUPTED = 130
UNEXPECTED = 7
"""Exit code of a bug in bcgbench, as of any fault that says nothing about the models."""


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """A command that returns its exit code, made safe: any error becomes one message on stderr and an exit code."""

    @functools.wraps(command)
    def run(**options: object) -> None:
        debug = bool(options.get("debug"))
        logging.basicConfig(
            level=logging.DEBUG if debug else logging.WARNING,
            format="%(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
            force=True,
        )
        try:
            code = command(**options)
        except BcgbenchError as error:
            _complain(error, debug=debug)
            code = error.exit_code
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        except (typer.Exit, typer.Abort, BrokenPipeError):  # Typer's own, and `| head`
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to the user: a bug, too, is told in one message
            _complain(error, debug=debug)
            code = UNEXPECTED
        raise typer.Exit(code)

    return run


def _complain(error: Exception, *, debug: bool) -> None:
    if debug:
        say(traceback.format_exc().rstrip())
    if isinstance(error, BcgbenchError):
        say(f"error: {error}")
        return
    kind = type(error).__name__
    hint = "" if debug else "; run again with --debug for the traceback"
    say(f"error: unexpected {kind}: {error}{hint}")


def say(text: str) -> None:
    """A line on stderr."""
    typer.echo(text, err=True)
