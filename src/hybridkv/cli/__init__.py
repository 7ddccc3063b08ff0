"""The command line: one file per command; commands print, the library computes.

``main`` installs signal handlers before it imports slow modules; ``outcome`` runs the command and sets the exit code.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code (hybridkv.cli.outcome); 130 after SIGINT, 143 after SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores signals
            signal.signal(number, _stop)
    from hybridkv.cli.outcome import run  # noqa: PLC0415  # the handlers must be installed first

    sys.exit(run())


def _stop(number: int, _frame: object) -> None:
    """Exit at once. Files are written in one piece, and an exception could be lost in an import or a callback."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # show the cursor, which a progress bar may have hidden
    os._exit(128 + number)
