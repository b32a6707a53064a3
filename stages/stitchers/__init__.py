"""Calls to samples: one version of the stitcher a module. A released one stays: a commit that exists is obeyed."""
