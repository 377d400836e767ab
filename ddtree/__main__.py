"""`python -m ddtree` is the command line."""

from ddtree.cli import main

if __name__ == "__main__":
    main()
