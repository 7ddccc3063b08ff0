"""An engine over HTTP, in OpenAI's forms.

    body -> bodies (checked) -> Asked -> generation: places in the queue, AsyncEngine -> a form: JSON, or events

What is not offered is refused by name. A client that goes away ends its requests. Connections have limits of time and
memory (connections), texts are tokenized in turns (turns), and pages of others are refused (origins).
"""

from hybridkv.serve.app import create_app
from hybridkv.serve.connections import ConnectionLimits
from hybridkv.serve.front import ServeOptions
from hybridkv.serve.server import Server, listen

__all__ = ["ConnectionLimits", "ServeOptions", "Server", "create_app", "listen"]
