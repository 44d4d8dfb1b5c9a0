"""`python -m dpfedexp` is the command line."""

from dpfedexp.cli import main

main()
