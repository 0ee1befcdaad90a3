"""The Kubernetes provider: sandboxes as pods, of agent-sandbox where that is installed."""
