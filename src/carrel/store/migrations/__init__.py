"""How the tables came to be, one step after another. A step that was released never changes."""
