"""The text of a kernel."""

INDENT = "    "


class Text:
    """Lines, indented as they are added."""

    def __init__(self):
        self.lines: list[str] = []

    def add(self, depth: int, lines: list[str]) -> None:
        self.lines += [INDENT * depth + line if line else "" for line in lines]

    def joined(self) -> str:
        return "\n".join(self.lines) + "\n"
