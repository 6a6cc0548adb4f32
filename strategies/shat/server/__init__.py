"""A server of parameters: applies the gradients that workers push, and answers with the model."""
