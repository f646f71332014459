"""What ``fused::linear_cross_entropy`` is made of: checks, torch's own formula, chunks of rows."""
