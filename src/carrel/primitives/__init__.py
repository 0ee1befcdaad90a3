"""Small pieces that several packages need, each written once. They import the standard library and `carrel.errors`, and
know nothing of sandboxes, policy or storage.
"""
