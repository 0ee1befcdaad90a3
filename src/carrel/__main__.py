"""`python -m carrel` is the `carrel` command."""

from carrel.cli import main

if __name__ == "__main__":
    main()
