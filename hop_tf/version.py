"""The version of hop_tf, read without an import by the build."""

__version__ = "0.1.0.dev0"
