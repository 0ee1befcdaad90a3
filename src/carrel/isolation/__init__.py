"""Linux primitives and the zygote: how a process becomes a sandbox. Knows nothing of providers, policy or the API."""
