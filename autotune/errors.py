"""Every error that a user can meet, as a tree. Anything else is a bug of ours."""


class AutotuneError(Exception):
    """Something that the person at the keyboard can mend; the text says how."""


class InputError(AutotuneError):
    """The input is wrong: exit code 2, one message, nothing created."""


class ModelFileError(InputError):
    """The model file cannot be used as it is."""


class SpaceError(InputError):
    """The search space asks for something that does not exist."""


class OptionError(InputError):
    """A command-line option has a value that is not allowed."""


class ResumeError(InputError):
    """The folder cannot be gone on with."""


class NothingRanError(AutotuneError):
    """No probe gave a number: exit code 1."""


class DiskFullError(AutotuneError):
    """Results cannot be written any more: exit code 1, what is on disk stays readable."""


class LaunchError(AutotuneError):
    """No process for probes could be started at all."""


class UnfitError(AutotuneError):
    """Nothing can be tuned on this machine as it is."""


class StoppedError(AutotuneError):
    """A signal asked the run to end."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by signal {signal_number}")
        self.signal_number = signal_number
