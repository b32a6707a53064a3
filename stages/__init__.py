"""The stages of a rollout, and what they need: sandboxes, evaluation rules, stitching, samples as Parquet."""
