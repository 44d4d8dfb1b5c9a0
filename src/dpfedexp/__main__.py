"""Entry point of `python -m dpfedexp`: runs the command line."""

from dpfedexp.cli import main

main()
