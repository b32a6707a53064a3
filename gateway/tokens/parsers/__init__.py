"""Readers of replies, one family of models a file."""
