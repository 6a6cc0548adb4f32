"""Transports: named queues between ranks."""
