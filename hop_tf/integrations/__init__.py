"""hop_tf within other programs. Imported by users only: each needs an extra of its own."""
