"""What crosses a process boundary: records, subject names, errors. Imports msgspec only."""
