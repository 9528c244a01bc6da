"""From a private gradient to a trained model: trainer, averaging, evaluation, events."""
