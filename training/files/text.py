"""Text from outside in Graft's messages: file names, keys of headers, captions, values of a client.

Python strings may have lone surrogates, half of a character: JSON's "\\ud83d" alone, or a byte of a file name
that is not UTF-8. No log or console can write them, and in an error one ends ComfyUI's queue. The one rule:
messages show the code of a surrogate, and text that is used must not have any.
"""

from __future__ import annotations

import reprlib

from ..user_error import UserError


def readable(text: str) -> str:
    """Return text that can be written anywhere, with codes such as \\udce9 for lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def make_readable(error: BaseException) -> None:
    """Make the message of an error `readable`, and those of its causes in the traceback."""
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        error = pending.pop()
        seen.add(id(error))
        if (text := str(error)) != readable(text):
            error.args = (readable(text),)
        causes = (error.__cause__, error.__context__)
        pending += [cause for cause in causes if cause is not None and id(cause) not in seen]


def require_letters(text: str, what: str) -> None:
    """Raise UserError for a lone surrogate: text encoders, file names and LoRA files cannot take it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} holds half of a letter ({ascii(text[error.start])} at {error.start}), or is from a name "
            "that is not UTF-8; type it again."
        ) from None


def shown(value: object) -> str:
    """Return a value for a message; large or deep ones are abbreviated."""
    return readable(_shown.repr(value))


def shortened(text: str, most: int = 600) -> str:
    """Return a message of at most `most` characters, without its middle."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-(most // 3 - 5) :]}"


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80
