"""`python -m bayesrnn`."""

from bayesrnn.cli import main

main()
