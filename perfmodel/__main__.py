"""`python -m perfmodel`: the same as the `perfmodel` command."""

__all__: list[str] = []

from perfmodel.cli import main

if __name__ == "__main__":
    main()
