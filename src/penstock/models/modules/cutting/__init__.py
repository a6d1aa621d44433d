"""Any torch module cut into stages: every stage runs the module's own forward pass and skips the parts that others have."""
