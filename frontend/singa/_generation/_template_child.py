"""In the child process: run chat templates of jinja2, with bounded memory and processor time.  `chat.py` has the requests.

The child loads this file without its package.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable
from datetime import datetime
from typing import Any

MEMORY = 64 << 20
"""The bytes of memory that a template may use; Linux enforces it."""

SECONDS = 0.75
"""The processor time of a template, with its compilation; Windows does not enforce it."""

LARGEST_TEXT = 16 << 20
"""The maximum bytes, in UTF-8, of a prompt that a template makes."""

OUT_OF_TIME = -int(getattr(signal, "SIGPROF", 0))
"""The exit code of a child whose template has used its processor time."""

_MESSAGE = 1000
"""The characters of a message."""


class TemplateRefused(Exception):
    """A template refuses its messages, or makes a text that is too long."""


def serve() -> Callable[[tuple[str, str]], tuple[str, bytes]]:
    """Return the function that answers (template, arguments in JSON) by ("", the prompt) or (a kind of error, the message)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    environment = _environment()
    compiled = functools.lru_cache(1)(environment.from_string)
    _bound()

    def answer(request: tuple[str, str]) -> tuple[str, bytes]:
        text, arguments = request
        if hasattr(signal, "setitimer"):  # its signal ends this process, whatever computes
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
        kind, content = "template", b""
        try:
            template = compiled(text)
            kind = "messages"
            return "", _prompt(template, json.loads(arguments))
        except MemoryError:
            kind = "memory"
        except RecursionError:
            kind = "nesting"
        except Exception as error:  # any kind: a template is a program
            content = _shown(error)
        finally:
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_PROF, 0)
        return kind, content

    return answer


def _shown(error: Exception) -> bytes:
    return (str(error)[:_MESSAGE].strip() or type(error).__name__).encode(errors="replace")


def _prompt(template: Any, arguments: dict[str, Any]) -> bytes:
    parts, size = [], 0
    for part in template.generate(arguments):
        parts.append(part.encode(errors="surrogatepass"))
        size += len(parts[-1])
        if size > LARGEST_TEXT:
            raise MemoryError
    return b"".join(parts)


def _environment() -> Any:
    """A sandbox in which a template reads nothing but its arguments, and changes nothing."""
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """The tag that marks what a model has written, as in transformers: its content is written as it is."""

        tags = {"generation"}  # noqa: RUF012 - the type of the base class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

        def _written(self, caller: Callable[[], str]) -> str:
            return caller()

    options = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols", Generation]}
    environment: Any = sandbox.ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
    return environment


def _bound() -> None:
    """Limit the address space to what is in use and `MEMORY` more, if the system supports it."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _json(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(text: str) -> None:
    raise TemplateRefused(text)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
