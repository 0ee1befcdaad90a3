"""The benchmarks of `make bench`: carrel and comparable programs (peers), measured in one run on this machine."""
