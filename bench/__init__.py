"""What `make bench` runs: carrel beside its peers, in one run, on this machine."""
