"""`python -m carrel.egress`: the egress.launch, as the control plane starts it."""

from carrel.egress.launch import main

main()
