"""Where tables and progress go."""

from rich.console import Console


def terminal_console() -> Console:
    """As wide as the terminal; a file or pipe has no width, so nothing is folded or cut for it."""
    console = Console()
    return console if console.is_terminal else Console(width=200)
