"""Errors that the user can solve: shown as one line, where every other error keeps its traceback."""


class UserError(ValueError):
    """Says the place, what was found, what is allowed and what to do.

    ComfyUI shows the class beside the message: "graft.UserError", without the path of the extension.
    """

    __module__ = "graft"

    def __init_subclass__(cls) -> None:
        cls.__module__ = UserError.__module__


class FileError(UserError, OSError):
    """A file or folder that cannot be read or written."""


class NotFiniteError(UserError, FloatingPointError):
    """A loss or a gradient is no number."""
