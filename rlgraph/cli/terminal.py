"""Where tables and progress go."""

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that this is called about; rich's own way ends the program


def terminal_console() -> Console:
    """As wide as the terminal; a file or pipe has no width, so nothing is folded or cut for it."""
    console = _Console()
    return console if console.is_terminal else _Console(width=200)
