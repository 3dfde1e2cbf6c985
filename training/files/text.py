"""Text from outside in what Graft says: names of files, keys of headers, captions, values of a client.

Python reads what no log and no console can write: half of a letter, as JSON's "\\ud83d" alone, or a byte of a
file's name that is not UTF-8. In an error it ends ComfyUI's queue, whose log takes whole letters only. The
one rule: half a letter is shown by its code, and refused where the text itself is used.
"""

from __future__ import annotations

import logging
import reprlib


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
    """Raise ValueError for half of a letter in `what`: no text encoder, file name or LoRA file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds half of a letter ({ascii(text[error.start])} at {error.start}), or is from a name "
            "that is not UTF-8; write it anew."
        ) from None


def shown(value: object) -> str:
    """Return a value as a message shows it: of what is large or deep, the start of each level."""
    return readable(_shown.repr(value))


def shortened(text: str, most: int = 600) -> str:
    """Return a message of at most `most` letters, its middle left out."""
    return text if len(text) <= most else f"{text[: most * 2 // 3]} ... {text[-(most // 3 - 5) :]}"


def make_log_readable() -> None:
    """Make all that Graft's modules log `readable`, once."""
    log = logging.getLogger(__name__.partition(".training.")[0])
    if not any(isinstance(handler, _MakesReadable) for handler in log.handlers):
        log.addHandler(_MakesReadable())


class _MakesReadable(logging.Handler):
    """Changes records on their way up: a package's handlers get what its modules log before the root's do."""

    def emit(self, record: logging.LogRecord) -> None:
        record.msg, record.args = readable(record.getMessage()), ()
        if record.exc_info and record.exc_info[1] is not None:
            make_readable(record.exc_info[1])
        if not logging.root.handlers and logging.lastResort:  # which logging takes where it finds none at all
            logging.lastResort.handle(record)


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = 80
