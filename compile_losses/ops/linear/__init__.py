"""What losses of a linear layer's output are made of: checks, torch's formulas, chunks of rows."""
