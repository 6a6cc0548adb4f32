"""Native kernels and TensorFlow operations."""
