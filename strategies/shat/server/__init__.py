"""The parameter server: applies the gradients that workers push, and answers with the model."""
