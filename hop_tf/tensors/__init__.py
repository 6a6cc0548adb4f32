"""Containers of values for communication: buckets, buffers, payloads and queues."""
