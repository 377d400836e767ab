"""`python -m ddtree` is the command line."""

if __name__ == "__main__":
    from ddtree.cli import main  # not by a worker process, which imports this file again

    main()
