"""The package index that sandboxes see: a front that asks the operator's indexes once and keeps what they gave."""
