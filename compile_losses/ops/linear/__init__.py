"""The parts of losses of a linear layer's output: checks, torch's formulas, chunks of rows."""
