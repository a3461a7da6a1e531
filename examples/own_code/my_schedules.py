"""Learning-rate schedules: functions of the progress of the decay, a scalar tensor from 0 to 1."""


def linear(progress):
    return 1 - progress
