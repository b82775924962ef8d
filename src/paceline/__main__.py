"""Run the command line with ``python -m paceline``."""

import signal
import sys

# Until the command line can stop in good order, Ctrl-C ends this process without a traceback of its imports.
if is_interruptible := signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory: no file of it takes the place of a library's module

from paceline.cli.main import main  # after the path is right

if __name__ == "__main__":
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
