"""The program inside a sandbox: commands, terminals, files. Runs in every image, so it depends on almost nothing."""
