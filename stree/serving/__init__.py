"""Serving: an engine that takes requests from any thread, and an OpenAI server around it."""

from stree.serving.engine import Engine
from stree.serving.handle import EmittedStep, QueueFull, RequestHandle
from stree.serving.threads import in_own_thread

__all__ = ["EmittedStep", "Engine", "QueueFull", "RequestHandle", "in_own_thread"]
