"""What a step will do on a cluster that is not there: time, memory and communication, predicted and explained.

:mod:`weft.plan.plan` captures a step and predicts it. :class:`weft.plan.prediction.Prediction` holds the numbers. The
other files compute parts of it.
"""
