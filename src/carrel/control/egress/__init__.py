"""The control plane's side of the proxy process: plans, questions, the log of connections."""
