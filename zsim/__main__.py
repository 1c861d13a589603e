"""`python -m zsim` is the command line `zsim`."""

from zsim.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
