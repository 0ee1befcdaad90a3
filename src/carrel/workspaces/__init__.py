"""The durable files of contexts: where they lie, how much they hold, how they go."""
