"""The images of a server, and the images that its sandboxes run from."""
