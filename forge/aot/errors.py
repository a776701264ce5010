"""The error of exported programs."""


class ExportError(RuntimeError):
    """A program cannot be exported, a file cannot be loaded, or a call does not fit what was exported."""
