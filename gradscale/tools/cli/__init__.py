"""The command line: ``gradscale doctor``, ``check``, ``check-trainer``, ``simulate`` and ``plot``."""
