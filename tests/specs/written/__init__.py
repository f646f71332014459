"""Losses as people write them: spellings that must match, and near misses that must not."""
