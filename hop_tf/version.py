"""The version of hop_tf. The build reads it without importing the package."""

__version__ = "0.1.0.dev0"
