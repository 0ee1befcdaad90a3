"""Programs that sandboxes have besides those of the host. They run inside, and import nothing of carrel."""
