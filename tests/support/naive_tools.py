"""The reader of tool calls that looks at all undecided text with each piece: what the real one must return."""

from __future__ import annotations

from shardfuse.serving.server.tools import _HEAD, _LONGEST_HEAD, _MARK, BEGIN, END, Call


class NaiveToolParser:
    """``ToolParser`` in time that is quadratic in the undecided text."""

    def __init__(self) -> None:
        self.calls = 0
        self.held = self.space = self.value = ""
        self.state = "content"

    def push(self, text: str) -> list[str | Call]:
        self.held += text
        found: list[str | Call] = []
        while (piece := getattr(self, self.state)()) is not None:
            if piece:
                found.append(piece)
        return found

    def flush(self) -> list[str | Call]:
        if self.state == "head":
            return [self.space + BEGIN + self.held]
        if self.state != "content" or (self.calls and not self.held.strip()):
            return []
        return [self.held] if self.held else []

    def content(self) -> str | None:
        at = self.held.find(BEGIN)
        if at >= 0:
            piece = self.held[:at].rstrip()
            self.space, self.held = self.held[len(piece) : at], self.held[at + len(BEGIN) :]
            self.state = "head"
            return piece
        begun = max(size for size in range(len(BEGIN)) if self.held.endswith(BEGIN[:size]))
        piece = self.held[: len(self.held) - begun].rstrip()
        self.held = self.held[len(piece) :]
        return piece or None

    def head(self) -> str | Call | None:
        match = _HEAD.match(self.held, 0, _LONGEST_HEAD)
        if match is None:
            end = self.held.find(END, 0, _LONGEST_HEAD)
            if end < 0 and len(self.held) < _LONGEST_HEAD:
                return None
            cut = _LONGEST_HEAD if end < 0 else end + len(END)
            piece, self.held, self.state = self.space + BEGIN + self.held[:cut], self.held[cut:], "content"
            return piece
        self.held, self.value, self.state = self.held[match.end() :], "", "arguments"
        self.calls += 1
        return Call(self.calls - 1, match[1], "")

    def arguments(self) -> str | Call | None:
        if not self.held:
            return None
        piece = ""
        while self.held and self.state == "arguments":
            piece, self.held = piece + self.held[0], self.held[1:]
            if _closed(self.value + piece):
                self.state = "tail"
        self.value += piece
        return Call(self.calls - 1, None, piece)

    def tail(self) -> str | None:
        mark = _MARK.search(self.held)
        if mark is None:
            return None
        self.held, self.space = self.held[mark.end() :], ""
        self.state = "content" if mark[0] == END else "head"
        return ""


def _closed(text: str) -> bool:
    """Whether each bracket of ``text`` outside strings is closed."""
    depth, inside, escaped = 0, False, False
    for letter in text:
        if inside:
            inside = escaped or letter != '"'
            escaped = letter == "\\" and not escaped
        else:
            inside = letter == '"'
            depth += (letter in "{[") - (letter in "}]")
    return depth == 0 and not inside
