"""The archive: a run's log as Parquet for good, verified, read by replay and DuckDB; and the purge that it allows."""
