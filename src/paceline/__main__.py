"""Run the command line with ``python -m paceline``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory: no file of it takes the place of a library's module

from paceline.cli.main import main  # after the path is right

if __name__ == "__main__":
    main()
