"""`python -m penstock`: the command line where its script is not on the PATH."""

from __future__ import annotations

from penstock.cli.main import main

if __name__ == "__main__":
    main()
