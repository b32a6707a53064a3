"""The conformance kit: what every sandbox backend must do, case by case, on a real sandbox of it.

`rollyard sandbox check NAME` runs it, also on a backend of your own: docs/sandboxes.md.
"""
