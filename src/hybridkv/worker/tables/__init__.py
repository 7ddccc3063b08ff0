"""Block tables and slots: where a token lies."""
