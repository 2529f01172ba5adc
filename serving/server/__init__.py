"""A server with OpenAI's API over one engine: ``shardfuse serve``. It needs ``pip install 'shardfuse[serve]'``."""

from .app import create_app
from .served import Served, ServerOptions

__all__ = ["Served", "ServerOptions", "create_app"]
