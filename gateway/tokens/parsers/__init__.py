"""Readers of replies, one family of models a file."""

from rollyard.gateway.tokens.parsers.families import FAMILIES, ends_in_reasoning, family_of, make_parser

__all__ = ["FAMILIES", "ends_in_reasoning", "family_of", "make_parser"]
