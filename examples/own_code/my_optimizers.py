"""Optimizers: how weights change, whatever ranks share them."""

from graphmoe.optim.rule import UpdateRule


def step_of_lion(weight, gradient, moments, step):
    """Return the new weights and moments (arXiv 2302.06675, algorithm 2)."""
    (average,), (beta1, beta2) = moments, step.numbers
    direction = (beta1 * average + (1 - beta1) * gradient).sign()
    return weight - step.lr * direction, beta2 * average + (1 - beta2) * gradient


lion = UpdateRule(("average",), lambda config: (config.beta1, config.beta2), step_of_lion)
