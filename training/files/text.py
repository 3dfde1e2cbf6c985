"""Text from outside in what Graft says: names of files, keys of headers, captions, values of a client.

Python reads what no log and no console can write: half of a letter, as JSON's "\\ud83d" alone, or a byte of a
file's name that is not UTF-8. In an error it ends ComfyUI's queue, whose log takes whole letters only. The
one rule: half a letter is shown by its code, and refused where the text itself is used.
"""

from __future__ import annotations

import reprlib

from ..user_error import UserError


def readable(text: str) -> str:
    """Return text that can be written anywhere: half of a letter as its code, such as \\udce9."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def make_readable(error: BaseException) -> None:
    """Make the message of an error `readable`, and those of the errors that a traceback shows with it."""
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
    """Raise UserError for half of a letter in `what`: no text encoder, file name or LoRA file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} holds half of a letter ({ascii(text[error.start])} at {error.start}), or is from a name "
            "that is not UTF-8; write it anew."
        ) from None


def shown(value: object) -> str:
    """Return a value as a message shows it: of what is large or deep, the start of each level."""
    return readable(_shown.repr(value))


def shortened(text: str, most: int = 600) -> str:
    """Return a message of at most `most` letters, its middle left out."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-(most // 3 - 5) :]}"


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80
