"""The command line: one file per command; commands print, the library computes.

``main`` is cheap to import, and answers signals before anything that is not; ``outcome`` runs a command to its end.
"""

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit, with the code of hybridkv.cli.outcome.run; 130 and 143 for SIGINT and SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as behind nohup
            signal.signal(number, _stop)
    from hybridkv.cli.outcome import run  # noqa: PLC0415  # the signals come first

    sys.exit(run())


def _stop(number: int, _frame: object) -> None:
    """End at once: nothing is half done on disk, and an exception could be lost, as in an import or a callback."""
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar had hidden the cursor
    os._exit(128 + number)
