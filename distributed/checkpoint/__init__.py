"""Verified checkpoints: torch DCP files, a manifest of their hashes, and a commit by rename."""
