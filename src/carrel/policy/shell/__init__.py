"""Reads shell text: finds every command it could run and every file it touches. Decides nothing."""
