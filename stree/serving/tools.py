"""Tools of a chat, and which of them must be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

__all__ = ["NamedTool", "Tool"]


class Function(BaseModel):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool of a chat."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function
    _given: Any = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, check: Callable[[Any], Tool]) -> Tool:
        tool = check(given)
        tool._given = given
        return tool

    @property
    def given(self) -> Any:
        """As the request has it, with its fields in their order, which templates write."""
        return self._given


class FunctionName(BaseModel):
    """Which function."""

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName
