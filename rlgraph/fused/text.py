"""A kernel's text."""

from dataclasses import dataclass

INDENT = "    "


@dataclass(frozen=True)
class Kernel:
    """A kernel's text, and the names of its pointers in order."""

    name: str
    text: str
    pointers: tuple[str, ...]


class Text:
    """Lines, indented as they are added."""

    def __init__(self):
        self.lines: list[str] = []

    def add(self, depth: int, lines: list[str]) -> None:
        self.lines += [INDENT * depth + line if line else "" for line in lines]
