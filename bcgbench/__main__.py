"""`python -m bcgbench` is the console script."""

from bcgbench.cli import main

if __name__ == "__main__":
    main()
