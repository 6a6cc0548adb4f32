"""Values on their way: buckets, buffers, payloads and queues."""
