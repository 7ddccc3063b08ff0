"""Lets ``python -m hybridkv`` be the command line."""

from hybridkv.cli import main

if __name__ == "__main__":
    main()
