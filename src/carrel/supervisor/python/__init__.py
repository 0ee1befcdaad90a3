"""Python in a sandbox: calls in fresh processes of a warm interpreter, and contexts that keep their variables."""
