"""The GPU tests under compute-sanitizer, see tests.sanitize.__main__."""
