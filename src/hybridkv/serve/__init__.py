"""An engine over HTTP, in OpenAI's forms.

    body -> bodies (checked) -> forms: Asked -> generation: places in the queue, AsyncEngine -> a form: JSON, or events

What is not offered is refused by name. A client that goes away ends its requests. Connections have limits of time and
memory (server), texts are tokenized in turns (tokens), and keys, pages and bodies are checked first (gates).
"""

from hybridkv.serve.app import create_app
from hybridkv.serve.front import ServeOptions
from hybridkv.serve.gates import ApiKeys
from hybridkv.serve.server import ConnectionLimits, Server, listen

__all__ = ["ApiKeys", "ConnectionLimits", "ServeOptions", "Server", "create_app", "listen"]
