"""What a request can begin with and needs; plans, carried out; copies, kept states, what stays."""
