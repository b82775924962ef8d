"""Run the command line with ``python -m paceline``."""

import signal
import sys

# Until the command line can stop in an orderly way, Ctrl-C ends this process without a traceback of its imports.
if is_interruptible := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory: its files must not replace library modules

from paceline.cli.main import main  # only after the path is fixed

if __name__ == "__main__":
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
