"""Reasoning in answers of a chat: what models write between ``<think>`` and ``</think>``, in front of the content."""

from __future__ import annotations

__all__ = ["BEGIN", "END", "ReasoningReader"]

BEGIN, END = "<think>", "</think>"


class ReasoningReader:
    """Splits an answer into its reasoning and its content, without the spaces around the markers.

    Text that may be part of a marker is held back until it is known.

    Args:
        is_open: whether the prompt ends with ``<think>``.  Otherwise the answer has reasoning where it begins with it.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._held, self._part = "", "reasoning" if is_open else "start"
        self._has_begun = False  # whether a character of the reasoning was returned

    def push(self, piece: str, *, is_last: bool = False) -> tuple[str, str]:
        """Append text; return the reasoning and the content that are certain now."""
        self._held += piece
        reasoning = ""
        if self._part == "start":
            text = self._held.lstrip()
            if text.startswith(BEGIN):
                self._part, self._held = "reasoning", text.removeprefix(BEGIN)
            elif is_last or not BEGIN.startswith(text):
                self._part = "content"
        if self._part == "reasoning":
            reasoning = self._reasoning(is_last=is_last)
        if self._part == "gap" and (text := self._held.lstrip()):
            self._part, self._held = "content", text
        if self._part != "content":
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def _reasoning(self, *, is_last: bool) -> str:
        """Take what is certain of the reasoning out of the text that is held back."""
        held = self._held if self._has_begun else self._held.lstrip()
        reasoning, end, behind = held.partition(END)
        if end:
            self._part, self._held = "gap", behind
            return reasoning.rstrip()
        sizes = range(0 if is_last else min(len(END) - 1, len(held)), 0, -1)
        size = next((size for size in sizes if END.startswith(held[-size:])), 0)
        reasoning = held[: len(held) - size].rstrip()
        self._held, self._has_begun = held[len(reasoning) :], self._has_begun or bool(reasoning)
        return reasoning
