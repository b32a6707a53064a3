"""What people see of samples: trees, marked text and pages; how often calls drift."""
