"""The command line: ``gradscale doctor``, ``check``, ``check-trainer`` and ``simulate``."""
