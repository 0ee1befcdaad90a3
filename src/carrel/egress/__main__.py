"""`python -m carrel.egress`: the egress process, as the control plane starts it."""

from carrel.egress.process import main

main()
