"""The secrets of contexts: kept, given to sandboxes, encrypted anew."""
